"""The block drafter's folder: starting weights, round trip, published names; bad folders say why."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.makers.block import from_target
from specalign.common.errors import UserError
from specalign.formats.block import load_drafter, save_drafter
from specalign.lm.model import Target
from specalign.rows import shards as data
from tests.builders import TRAINED_BLOCKS as VARIANTS
from tests.builders import block_options
from tests.builders import trained_block as build
from tests.target_models import tiny_target


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder_round_trip(
    target: Target, samples: data.Samples, tmp_path: Path, variant: dict[str, Any]
) -> None:
    drafter = build(target, samples, **variant)
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    again = load_drafter(tmp_path, target)
    assert again.config == drafter.config and torch.equal(again.draft_vocab, drafter.draft_vocab)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])


def test_another_targets_name_is_said(
    target: Target, samples: data.Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of the same name, wherever it lies, is taken for the same weights."""
    save_drafter(build(target, samples), tmp_path, dtype=torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    for made_for, said in (
        ("debug", ""),
        ("some/where/Debug/", ""),
        ("", ""),
        ("org/other", "'org/other'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "target": made_for}))
        (tmp_path / "SHA256SUMS").unlink(missing_ok=True)
        load_drafter(tmp_path, target)
        noted = capsys.readouterr().err
        assert said in noted and ("was trained for" in noted) == bool(said)


def fails(folder: Path, target: Target, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_drafter(folder, target)


def test_configs_that_do_not_fit(target: Target, samples: data.Samples, tmp_path: Path) -> None:
    save_drafter(build(target, samples), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value, says in (
        ("architectures", ["LlamaForCausalLM"], "not a block drafter"),
        ("vocab_size", 9, "vocab_size is 9"),
        ("draft_vocab_size", 63, r"draft_vocab has shape \(64,\), expected \(63,\)"),
        ("hidden_act", "sillu", "did you mean 'silu'"),
        ("rms_norm_eps", None, "rms_norm_eps=None must be a number"),
        ("intermediate_size", 64, "has shape"),
        ("num_key_value_heads", 1, "num_key_value_heads is 1, target"),
        ("head_dim", 8, "head_dim is 8, target"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        fails(tmp_path, target, says)
    del config["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    fails(tmp_path, target, "rms_norm_eps is missing")


def test_weights_that_do_not_fit(target: Target, samples: data.Samples, tmp_path: Path) -> None:
    save_drafter(build(target, samples), tmp_path)
    weights = load_file(file := str(tmp_path / "model.safetensors"))
    vocab = weights["draft_vocab"]
    for name, tensor, says in (
        ("odd", torch.zeros(1), "unknown tensor 'odd'"),
        ("fc.weight", weights["fc.weight"] * torch.nan, "fc.weight contains non-finite values"),
        ("draft_vocab", vocab.flip(0), "draft_vocab must hold ascending"),
        ("draft_vocab", vocab + 5000, "draft_vocab must hold ascending"),
    ):
        save_file({**weights, name: tensor}, file)
        fails(tmp_path, target, says)
    del weights["fc.weight"]
    save_file(weights, file)
    fails(tmp_path, target, "missing tensor 'fc.weight'")


def test_missing_rotary_tables_are_refused(tmp_path: Path) -> None:
    """And one that has its own is taken, with what it drafts."""
    llama, gpt2 = tiny_target("llama"), tiny_target("gpt2")
    save_drafter(from_target(llama, block_options(context="taps"), None), tmp_path)
    with pytest.raises(UserError, match="target 'gpt2' lacks the rotary tables it needs"):
        load_drafter(tmp_path, gpt2)
    made = from_target(gpt2, block_options(context="shared_kv", layers=2), None)
    save_drafter(made, tmp_path / "own", dtype=torch.float32)
    again = load_drafter(tmp_path / "own", gpt2)
    assert again.config == made.config and again.places is not None
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
