"""Drafters that are networks of their own: fresh ones, `drafter.init`, and those made of a target's layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F

from align.config.drafter import DrafterConfig
from align.makers.standalone import adapt, make_causal, make_standalone
from specalign.common.errors import UserError
from specalign.formats.masked_lm import load_masked_lm, save_masked_lm
from specalign.formats.standalone import save_standalone
from specalign.lm.debug import debug_model
from specalign.lm.masks import register
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from specalign.models.masked_lm import annealed_see
from tests.masked_lms import QWEN
from tests.masked_lms import masked_block_logits as block_session
from tests.masked_lms import partly_masked as tokens
from tests.target_drafters import of_own_layers
from tests.target_models import some_text, tiny_target
from tests.target_wrappers import tiny_wrapper


@pytest.mark.parametrize("kind", ["ddit", "masked_lm"])
def test_a_fresh_one_depends_on_its_seed_alone(kind: str, target: Target) -> None:
    drafter = DrafterConfig(kind=kind, layers=2, hidden_size=32, heads=2, cond_dim=16)
    one, again, other = (make_standalone(target, drafter, seed) for seed in (0, 0, 1))
    assert one.config == again.config and one.config.vocab_size == target.vocab_size
    own = dict(again.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in one.named_parameters())
    same = all(torch.equal(p, dict(other.named_parameters())[n]) for n, p in one.named_parameters())
    assert same == (kind == "masked_lm")  # whose weights are the target's


@pytest.mark.parametrize("kind", ["ddit", "masked_lm"])
def test_what_an_init_keeps_though_the_recipe_asks_otherwise_is_said(
    kind: str, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own: dict[str, Any] = {"kind": kind, "layers": 1, "hidden_size": 32, "heads": 2}
    save_standalone(make_standalone(target, DrafterConfig(**own)), tmp_path)
    for same in ({"kind": kind}, own):
        made = make_standalone(target, DrafterConfig(init=str(tmp_path), block_size=5, **same))
        assert capsys.readouterr().err == "" and made.config.block_size == 5
    make_standalone(target, DrafterConfig(init=str(tmp_path), **{**own, "layers": 3}))
    note = f"note: drafter.init={tmp_path} has layers=1; ignoring layers=3\n"
    assert capsys.readouterr().err == note


def other_target(kind: str, target: Target) -> Target:
    """A tiny target of another architecture."""
    torch.manual_seed(1)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 80, "vocab_size": 64}
        config: Any = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    else:
        sizes = {k: v for k, v in QWEN.items() if k != "rope_scaling"}
        cls: Any = transformers.Qwen2Config if kind == "qwen2" else transformers.Qwen3Config
        config = cls(**{**sizes, "vocab_size": 64, "num_hidden_layers": 3, "head_dim": 8})
    config._attn_implementation = register()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return Target(model, target.tokenizer, ModelSource(kind))


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen2", "qwen3"])
def any_target(request: pytest.FixtureRequest, target: Target) -> Target:
    return target if request.param == "llama" else other_target(request.param, target)


@pytest.mark.parametrize("share", [True, False])
@torch.no_grad()
def test_all_layers_under_the_causal_mask_are_the_target(any_target: Target, share: bool) -> None:
    """Progress 0 of the annealing: what predicts position i + 1 is the target's row i."""
    network = adapt(any_target, range(any_target.num_layers), 36, share_embedding=share)
    see = annealed_see(9, 0.0, torch.Generator().manual_seed(0))
    expected = any_target.forward(tokens()).logits_BLV
    assert expected is not None
    torch.testing.assert_close(
        network(tokens(), see=see)[:, 1:], expected[:, :-1], atol=5e-5, rtol=1e-4
    )


def test_adapted_drafters_refuse_what_does_not_fit(target: Target, tmp_path: Path) -> None:
    for options, words in (
        ({"mask_token_id": 999}, "mask_token_id=999 is not within"),
        ({"attention": "ful"}, "did you mean 'full'"),
    ):
        with pytest.raises(UserError, match=words):
            adapt(target, **{"layers": [0], "mask_token_id": 36, **options})
    network = adapt(target, [0], 36, attention="full")
    save_masked_lm(network, tmp_path)
    assert load_masked_lm(tmp_path, target=target).family.attention == "full"
    with pytest.raises(UserError, match="made for target 'debug' .*pass that target"):
        load_masked_lm(tmp_path)
    with pytest.raises(UserError, match="made for target 'debug' .embedding"):
        load_masked_lm(tmp_path, target=other_target("gpt2", target))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "base": "LlamaForCausaLM"}))
    with pytest.raises(UserError, match="did you mean 'LlamaForCausalLM'"):
        load_masked_lm(tmp_path, target=target)
    del config["base_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="missing key 'base_config'"):
        load_masked_lm(tmp_path, target=target)


@pytest.mark.parametrize("share", [True, False])
def test_adapted_drafters_train_alone(any_target: Target, share: bool, tmp_path: Path) -> None:
    before = {name: t.clone() for name, t in any_target.model.state_dict().items()}
    network = adapt(any_target, [0, 2], 36, share_embedding=share)
    size = any_target.embedding_VD.shape
    assert any(p.shape == size for p in network.parameters()) != share
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    keep = tokens() == 36
    F.cross_entropy(network(tokens())[keep], torch.full((int(keep.sum()),), 3)).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for n, p in network.named_parameters())
    optimizer.step()
    for name, tensor in any_target.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    save_masked_lm(network, tmp_path)
    stored = load_file(str(tmp_path / "model.safetensors"))
    assert any(t.shape == size for t in stored.values()) != share
    loaded = load_masked_lm(tmp_path, target=any_target if share else None)
    assert (loaded.family, loaded.source) == (network.family, network.source)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens()), network(tokens()), atol=1e-6, rtol=1e-6)
        prefix, block = torch.tensor([[9, 8, 7, 6]]), torch.tensor([[36, 36, 36]])
        cached = block_session(loaded, prefix, block, [3, 1])
        at = torch.arange(7)
        see = (at <= at[:, None]) | (at[:, None] >= 4)
        whole = network(torch.cat((prefix, block), dim=1), see=see[None, None])[:, 4:]
    torch.testing.assert_close(cached, whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["autoregressive", "masked_lm"])
def test_drafters_out_of_the_layers_of_a_wrapped_text_model(kind: str) -> None:
    """Saved under the text model's own class, and loaded again. Whether head and embedding are one, the whole model says, not its
    text model's config."""
    model = tiny_wrapper("idefics3", tie_word_embeddings=True)
    assert model.config.text_config.tie_word_embeddings and not model.config.tie_word_embeddings
    target = prove_target(model, debug_model("Llama")[1], ModelSource("wrapped"))
    assert of_own_layers(target, kind, [some_text(target, 9)[0].tolist()], 8) == "yes"


def test_a_head_with_a_bias_of_zeros_has_one() -> None:
    """Transformers' own start: the saved folder would lack it."""
    target = tiny_target("phi")
    assert target.head_bias_V is not None
    target.head_bias_V.data.zero_()
    with pytest.raises(UserError, match="its head has a bias"):
        make_causal(target, DrafterConfig(kind="autoregressive", layers=2))
