"""Masked-diffusion language models: each family's own layout, its mask, its shift; adaptation, caches, folders, LoRA."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from align.common.errors import UserError
from align.models.families import FAMILIES
from align.models.masked_checkpoint import adapt, from_config, load_masked_lm, save_masked_lm
from align.models.masked_lm import MaskedLM
from align.target.model import Target
from tests.builders import DREAM, QWEN
from tests.builders import NO_TOKENS as NONE
from tests.builders import masked_block_logits as block_session
from tests.builders import partly_masked as tokens

LLADA = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2,
    "mlp_hidden_size": 48, "embedding_size": 40, "vocab_size": 40, "max_sequence_length": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "weight_tying": False, "mask_token_id": 36, "activation_type": "silu", "block_type": "llama",
    "layer_norm_type": "rms", "rope": True, "alibi": False, "include_bias": False, "include_qkv_bias": False,
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"}, "init_std": 0.2, "precision": "amp_bf16",
}  # fmt: skip
SDAR = {
    **QWEN, "model_type": "sdar", "architectures": ["SDARForCausalLM"], "mask_token_id": 36, "block_size": 3, "head_dim": 16,
}  # fmt: skip
DIFFULLAMA = {**QWEN, "model_type": "llama", "architectures": ["DiscreteDiffusionModel"], "mask_token_id": 36}
DIFFUGPT = {
    "model_type": "gpt2", "architectures": ["DiscreteDiffusionModel"], "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "vocab_size": 40, "mask_token_id": 36, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": LLADA, "dream": DREAM, "sdar": SDAR, "diffullama": DIFFULLAMA, "diffugpt": DIFFUGPT,
}  # fmt: skip
QWEN_LAYER = (
    "input_layernorm.weight", "mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "post_attention_layernorm.weight", "self_attn.k_proj.weight", "self_attn.o_proj.weight", "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
)  # fmt: skip
PUBLISHED = {  # as the checkpoints have them: the layer's, then the rest
    "llada": (
        "model.transformer.blocks.{i}.",
        ("attn_norm.weight", "attn_out.weight", "ff_norm.weight", "ff_out.weight", "ff_proj.weight", "k_proj.weight",
         "q_proj.weight", "up_proj.weight", "v_proj.weight"),
        ("model.transformer.ff_out.weight", "model.transformer.ln_f.weight", "model.transformer.wte.weight"),
    ),
    "dream": (
        "model.layers.{i}.",
        (*QWEN_LAYER, "self_attn.k_proj.bias", "self_attn.q_proj.bias", "self_attn.v_proj.bias"),
        ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"),
    ),
    "sdar": (
        "model.layers.{i}.",
        (*QWEN_LAYER, "self_attn.k_norm.weight", "self_attn.q_norm.weight"),
        ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"),
    ),
    "diffullama": (
        "denoise_model.layers.{i}.", QWEN_LAYER, ("denoise_model.norm.weight", "embed_tokens.weight", "lm_head.weight"),
    ),
    "diffugpt": (
        "denoise_model.h.{i}.",
        tuple(f"{part}.{kind}" for part in ("attn.c_attn", "attn.c_proj", "ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj")
              for kind in ("weight", "bias")),
        ("denoise_model.ln_f.bias", "denoise_model.ln_f.weight", "denoise_model.wpe.weight", "embed_tokens.weight"),
    ),
}  # fmt: skip


def small(name: str, **changes: Any) -> MaskedLM:
    """A family's network with random weights, norms and biases too, so that a slip can't hide."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = from_config({**CONFIGS[name], **changes})
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    return network


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_has_the_published_names_and_loads_again(name: str, tmp_path: Path) -> None:
    network = small(name)
    save_masked_lm(network, tmp_path)
    prefix, layer, rest = PUBLISHED[name]
    expected = {prefix.format(i=i) + part for i in range(2) for part in layer} | set(rest)
    assert set(load_file(str(tmp_path / "model.safetensors"))) == expected
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIGS[name]
    loaded = load_masked_lm(tmp_path)
    assert (loaded.family.name, loaded.mask_token_id) == (name, 36)
    torch.testing.assert_close(loaded(tokens()), network(tokens()), atol=0, rtol=0)
    for number in ("5KB", "5GB"):  # in shards, and whole again beside what was there
        save_masked_lm(loaded, tmp_path, max_shard_size=number)
        assert (tmp_path / "model.safetensors.index.json").exists() == (number == "5KB")
        torch.testing.assert_close(load_masked_lm(tmp_path)(tokens()), network(tokens()), atol=0, rtol=0)
    whole = load_file(str(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    torch.testing.assert_close(load_masked_lm(tmp_path)(tokens()), network(tokens()), atol=0, rtol=0)


def llada_reference(w: dict[str, Tensor], tokens_BL: Tensor) -> Tensor:
    """LLaDA's forward, from its paper and its own names: nothing of transformers."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"model.transformer.{name}.weight"]

    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequency = 500000.0 ** (-torch.arange(half) / half)
        angle = torch.arange(x.shape[-2])[:, None] * frequency
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = w["model.transformer.wte.weight"][tokens_BL]
    for i in range(2):
        at = f"blocks.{i}."
        linear = {n: w[f"model.transformer.{at}{n}.weight"].T for n in
                  ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")}  # fmt: skip
        h = norm(x, at + "attn_norm")
        q, k, v = (
            (h @ linear[n]).unflatten(-1, (-1, 8)).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj")
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = (rotated(q) @ rotated(k).transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ linear["attn_out"]
        h = norm(x, at + "ff_norm")
        x = x + (F.silu(h @ linear["ff_proj"]) * (h @ linear["up_proj"])) @ linear["ff_out"]
    return norm(x, "ln_f") @ w["model.transformer.ff_out.weight"].T


def test_llada_computes_what_its_names_say(tmp_path: Path) -> None:
    network = small("llada")
    save_masked_lm(network, tmp_path)
    with torch.no_grad():
        expected = llada_reference(load_file(str(tmp_path / "model.safetensors")), tokens())
        torch.testing.assert_close(network(tokens()), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_mask_and_shift_equal_transformers_own_eager_attention(name: str) -> None:
    """Row i predicts position i: the raw row before it where the family has a shift, applied once."""
    network, family = small(name), FAMILIES[name]
    plain = getattr(transformers, family.base)(copy.deepcopy(network.model.config))
    plain.load_state_dict(network.model.state_dict())
    plain.eval().set_attn_implementation("eager")
    length = tokens().shape[1]
    block = torch.arange(length) // (3 if name == "sdar" else length)
    unseen = torch.zeros(length, length).masked_fill(
        block[None] > block[:, None], torch.finfo(torch.float32).min
    )
    with torch.no_grad():
        raw = plain(tokens(), attention_mask=unseen[None, None], use_cache=False).logits
        got = network(tokens())
    if family.shift:
        assert not got[:, 0].any()
        got, raw = got[:, 1:], raw[:, :-1]
    torch.testing.assert_close(got, raw, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_the_mask_is_honoured(name: str) -> None:
    network = small(name)
    other = tokens()
    other[:, 7] = (other[:, 7] + 1) % 36
    shift = FAMILIES[name].shift

    def changed(see: Tensor | None) -> list[bool]:
        """Raw rows that token 7 reaches."""
        difference = (network(tokens(), see=see) - network(other, see=see)).abs().amax((0, 2)) > 1e-6
        return difference[shift:].tolist()

    everything = [True] * (9 - shift)
    assert changed(torch.ones(9, 9, dtype=torch.bool)) == everything
    assert changed(torch.ones(9, 9, dtype=torch.bool).tril()) == [i >= 7 for i in range(9 - shift)]
    assert changed(None) == ([i >= 6 for i in range(9)] if name == "sdar" else everything)
    first = torch.eye(9, dtype=torch.bool).repeat(2, 1, 1, 1)
    assert changed(first) == [i == 7 for i in range(9 - shift)]


def test_only_the_rows_that_are_kept_meet_the_head() -> None:
    network, keep = small("dream"), tokens() == 36
    torch.testing.assert_close(network(tokens(), keep=keep), network(tokens())[keep], atol=1e-5, rtol=1e-5)
    moved = torch.arange(5, 14)[None]  # rotary positions are relative
    torch.testing.assert_close(network(tokens(), positions_BL=moved), network(tokens()), atol=1e-4, rtol=1e-4)
    stretched = network(tokens(), positions_BL=moved * 2)
    assert not torch.allclose(stretched, network(tokens()), atol=1e-2)


LLADA_8B = {
    **LLADA, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288,
    "embedding_size": 126464, "vocab_size": 126464, "max_sequence_length": 4096, "mask_token_id": 126336,
}  # fmt: skip
DREAM_7B = {
    **DREAM, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072, "mask_token_id": 151666,
}  # fmt: skip
SDAR_17B = {
    **SDAR, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "mask_token_id": 151669,
}  # fmt: skip
LLAMA_7B = {
    **DIFFULLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000,
}  # fmt: skip
GPT2 = {**DIFFUGPT, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLADA_8B, 8_015_581_184),
        (DREAM_7B, 7_615_616_512),
        ({**SDAR_17B, "tie_word_embeddings": True}, 1_720_574_976),
        (SDAR_17B, 1_720_574_976 + 151_936 * 2048),
        (LLAMA_7B, 6_738_415_616),
        ({**GPT2, "vocab_size": 50257}, 124_439_808),
        ({**GPT2, "vocab_size": 50258}, 124_439_808 + 768),
    ],
)
def test_published_sizes(config: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        network = from_config(config)
    assert sum(p.numel() for p in network.parameters()) == count
    if "d_model" in config or "rope_theta" in config:
        assert network.model.config.rope_parameters["rope_theta"] == config["rope_theta"]


def test_mask_ids_come_from_the_config_the_tokenizer_or_the_record(tmp_path: Path) -> None:
    config = {k: v for k, v in DIFFUGPT.items() if k != "mask_token_id"}
    network = small("diffugpt", vocab_size=42)  # rows for a mask that config.json does not count
    network.source = {**config, "vocab_size": 40}
    save_masked_lm(network, tmp_path)
    with pytest.raises(UserError, match=r"mask_token_id=10541 is not within 0\.\.41"):
        load_masked_lm(tmp_path)
    added = {"40": {"content": "[M]"}, "39": {"content": "x"}}
    for named in ("[M]", {"content": "[M]"}):
        values = {"mask_token": named, "added_tokens_decoder": added}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        loaded = load_masked_lm(tmp_path)
        assert loaded.mask_token_id == 40 and loaded.head_weight_VD.shape == (42, 32)


def test_broken_folders_say_why_in_one_line(tmp_path: Path) -> None:
    def write(config: dict[str, Any] | None = None, **tensors: Any) -> None:
        save_masked_lm(small("llada"), tmp_path)
        whole = {**load_file(str(tmp_path / "model.safetensors")), **tensors}
        save_file({k: v for k, v in whole.items() if v is not None}, str(tmp_path / "model.safetensors"))
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))

    def fails(words: str, **options: Any) -> None:
        with pytest.raises(UserError, match=re.escape(words)) as caught:
            load_masked_lm(tmp_path, **options)
        assert "\n" not in str(caught.value)

    with pytest.raises(UserError, match="no such folder"):
        load_masked_lm(tmp_path / "nowhere")
    fails("no config.json")
    write()
    fails("remote code is never run", trust_remote_code=True)
    write(**{"model.transformer.blocks.1.up_proj.weight": None})
    fails("misses 'model.transformer.blocks.1.up_proj.weight'")
    write(**{"model.transformer.extra": torch.zeros(1)})
    fails("unknown tensor 'model.transformer.extra'")
    write(**{"model.transformer.blocks.0.attn_out.weight": torch.zeros(32, 31)})
    fails("model.transformer.blocks.0.attn_out.weight has shape (32, 31), expected (32, 32)")
    write(**{"model.transformer.ln_f.weight": torch.full((32,), torch.nan)})
    fails("ln_f.weight holds values that are no numbers")
    for key, value, words in (
        ("model_type", "lada", "model_type='lada'"),
        ("alibi", True, "alibi=True; llada needs False"),
        ("mask_token_id", 40, "mask_token_id=40 is not within 0..39"),
        ("mask_token_id", "x", "mask_token_id='x'"),
        ("n_heads", 0, "config"),
        ("d_model", "wide", "hidden_size"),
    ):
        write({**LLADA, key: value})
        if key != "n_heads":
            fails(words)
    write({**LLADA, "weight_tying": True})
    fails("'model.transformer.ff_out.weight' differs from the embedding that it is tied to")
    write()
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    fails("not readable")
    (tmp_path / "model.safetensors").unlink()
    fails("has neither model.safetensors nor pytorch_model.bin")
    for index in ("{", '{"weight_map": {"a": "../a.safetensors"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        fails("model.safetensors.index.json")
    (tmp_path / "model.safetensors.index.json").unlink()
    torch.save({"a": print}, tmp_path / "pytorch_model.bin")
    fails("holds print objects, not tensors alone")
    torch.save([torch.zeros(1)], tmp_path / "pytorch_model.bin")
    fails("no table of tensors")
    with pytest.raises(UserError, match="block_size=0"):
        small("sdar", block_size=0)


@pytest.mark.parametrize("name", ["sdar", "adapted"])
@torch.no_grad()
def test_cached_denoising_equals_the_whole_forward(name: str, target: Target) -> None:
    network = small("sdar") if name == "sdar" else adapt(target, [0, 3], 36)
    prefix, block = tokens(1, 9, seed=5).clamp_max(35), torch.tensor([[36, 36, 36]])
    cached = block_session(network, prefix, block, [3, 6] if name == "sdar" else [2, 1, 6])
    whole = network(torch.cat((prefix, block), dim=1))[:, 9:]
    torch.testing.assert_close(cached, whole, atol=2e-5, rtol=1e-4)
    half = torch.tensor([[36, 7, 36]])  # partly revealed: still one block
    cached = block_session(network, prefix, half, [3, 6])
    whole = network(torch.cat((prefix, half), dim=1))[:, 9:]
    torch.testing.assert_close(cached, whole, atol=2e-5, rtol=1e-4)


def test_caches_are_refused_where_they_would_be_wrong() -> None:
    with pytest.raises(ValueError, match="full attention: no exact cache"):
        small("dream").new_cache(8)
    network = small("sdar")
    cache = network.new_cache(8)
    network.denoise(torch.ones(1, 4, dtype=torch.int64), NONE, cache)
    assert cache.length == 3
    cache.length = 2
    with pytest.raises(ValueError, match="no whole blocks of 3"):
        network.denoise(NONE, torch.ones(1, 3, dtype=torch.int64), cache)
    cache.length = 0
    network.denoise(torch.ones(1, 3, dtype=torch.int64), NONE, cache)
    with pytest.raises(ValueError, match="full"):
        network.denoise(torch.ones(1, 5, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64), cache)
