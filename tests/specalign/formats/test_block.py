"""The block drafter's folder: starting weights, round trip, published names; bad folders say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.data import shards as data
from align.makers.block import from_target
from specalign.common.errors import UserError
from specalign.formats.block import load_drafter, save_drafter
from specalign.lm.model import Target
from tests.builders import TRAINED_BLOCKS as VARIANTS
from tests.builders import block_options
from tests.builders import trained_block as build
from tests.published_blocks import IDS, backbone, dflash_config, pruned, speculators_config, write
from tests.target_models import tiny_target


@pytest.mark.parametrize("whole", [False, True])
def test_another_engines_draft_vocabulary_has_the_size_that_its_config_says(
    tmp_path: Path, target: Target, whole: bool
) -> None:
    """In the speculators layout; DFlash knows no such key, which counts there where a vocabulary is stored."""
    tensors = backbone(target) | ({} if whole else pruned(target))
    fits, held = (
        (target.vocab_size, "no d2t") if whole else (len(IDS), f"a d2t for {len(IDS)} draft tokens")
    )
    for config in (speculators_config(target), dflash_config(target)):
        for said in (None, fits, 77, "x"):
            folder = write(tmp_path / "theirs", {**config, "draft_vocab_size": said}, tensors)
            if said in (None, fits) or (whole and "speculators_model_type" not in config):
                assert load_drafter(folder, target).draft_size == fits
            else:
                with pytest.raises(
                    UserError,
                    match=f"draft_vocab_size={said!r}, and model.safetensors holds {held}$",
                ):
                    load_drafter(folder, target)


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder_round_trip(
    target: Target, samples: data.Samples, tmp_path: Path, variant: dict[str, Any]
) -> None:
    drafter = build(target, samples, **variant)
    save_drafter(drafter, tmp_path, card="# card\n", dtype=torch.float32)
    again = load_drafter(tmp_path, target)
    assert again.config == drafter.config and torch.equal(again.draft_vocab, drafter.draft_vocab)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
    assert (tmp_path / "README.md").read_text() == "# card\n"


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
        assert said in noted and ("was made for" in noted) == bool(said)


def test_what_an_older_version_saved_loads_as_it_was(
    target: Target, samples: data.Samples, tmp_path: Path
) -> None:
    drafter = build(target, samples, markov_rank=8)
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("markov", "convolution"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_drafter(tmp_path, target).config == drafter.config
    (tmp_path / "config.json").write_text(json.dumps({**config, "markov": "vanila"}))
    with pytest.raises(UserError, match="did you mean 'vanilla'"):
        load_drafter(tmp_path, target)


def fails(folder: Path, target: Target, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_drafter(folder, target)


def test_configs_that_do_not_fit(target: Target, samples: data.Samples, tmp_path: Path) -> None:
    save_drafter(build(target, samples), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value, says in (
        ("architectures", ["LlamaForCausalLM"], "not a block drafter"),
        ("vocab_size", 9, "vocab_size is 9"),
        ("context", "tap", "did you mean 'taps'"),
        ("block_size", 0, "at least 1"),
        ("block_size", 2.5, "block_size=2.5 must be an integer"),
        ("block_size", 100000, "must be at most 512"),
        ("target_layer_ids", [1, 77], "are not within 0..3"),
        ("target_layer_ids", "3", "target_layer_ids=.3. must be a list"),
        ("draft_vocab_size", 63, "63 entries"),
        ("mask_token_id", 99999, "mask_token_id=99999 is not within"),
        ("hidden_act", "sillu", "did you mean 'silu'"),
        ("markov_rank", -1, "markov_rank=-1 must be at least 0"),
        ("rope_theta", 0, "rope_theta=0.0 must be at least"),
        ("rms_norm_eps", None, "rms_norm_eps=None must be a number"),
        ("extra", 3, "extra=3 must be"),
        ("intermediate_size", 64, "has shape"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        fails(tmp_path, target, says)
    del config["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    fails(tmp_path, target, "rms_norm_eps is missing")


def test_weights_that_do_not_fit(target: Target, samples: data.Samples, tmp_path: Path) -> None:
    save_drafter(build(target, samples), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(str(file))
    vocab, fc = weights["draft_vocab"], weights["fc.weight"]
    twice = vocab.clone()
    twice[1] = twice[0]
    save_file({k: v for k, v in weights.items() if k != "fc.weight"}, str(file))
    fails(tmp_path, target, "misses 'fc.weight'")
    for name, tensor, says in (
        ("odd", torch.zeros(1), "unknown tensor 'odd'"),
        ("fc.weight", fc * float("nan"), "fc.weight holds values that are no numbers"),
        ("fc.weight", fc * float("inf"), "fc.weight holds values that are no numbers"),
        *(
            ("draft_vocab", wrong, "draft_vocab must be ascending token ids")
            for wrong in (twice, vocab.flip(0), vocab + 5000, vocab.float())
        ),
    ):
        save_file({**weights, name: tensor}, str(file))
        fails(tmp_path, target, says)


@pytest.mark.parametrize(
    ("key", "value"), [("num_key_value_heads", 8192), ("num_key_value_heads", 1), ("head_dim", 8)]
)
def test_a_drafter_that_shares_keys_has_the_targets_heads(
    target: Target, samples: data.Samples, tmp_path: Path, key: str, value: int
) -> None:
    """Weights of that shape beside it or not: the target's cache would be read as what it is not."""
    save_drafter(build(target, samples), tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    (tmp_path / "drafter/config.json").write_text(json.dumps({**config, key: value}))
    (tmp_path / "drafter/checksums.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match=f"{key} is {value}, target"):
        load_drafter(tmp_path / "drafter", target)


def test_a_drafter_that_wants_its_targets_tables_is_refused_where_there_are_none(
    tmp_path: Path,
) -> None:
    """And one that has its own is taken, with what it drafts."""
    llama, gpt2 = tiny_target("llama"), tiny_target("gpt2")
    save_drafter(from_target(llama, block_options(context="taps"), None), tmp_path)
    with pytest.raises(
        UserError, match="uses its target's rotary tables, and target 'gpt2' has none that fit"
    ):
        load_drafter(tmp_path, gpt2)
    made = from_target(gpt2, block_options(context="shared_kv", layers=2), None)
    save_drafter(made, tmp_path / "own", dtype=torch.float32)
    again = load_drafter(tmp_path / "own", gpt2)
    assert again.config == made.config and again.places is not None
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
