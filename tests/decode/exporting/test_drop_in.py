"""A `custom_generate` folder is compared as a user runs it, and faults in it are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.common.errors import UserError
from align.models.checkpoints.block import load_drafter, save_drafter
from align.target.loading import load_target
from align.target.model import Target
from decode.drafters.block import BlockProposer
from decode.engine.compiled import stock_model
from decode.engine.decoder import Decoder
from decode.exporting.parity import exported
from decode.exporting.registry import FORMATS
from decode.exporting.verdict import Verdict, decoded
from tests.builders import PROMPT, block_network, overfit_block_network
from tests.target_models import tiny_target


def test_an_export_is_the_drafter_and_a_drafter_of_this_project_still(tmp_path: Path, target: Target) -> None:
    save_drafter(
        block_network(target, "shared_kv", markov_rank=8),
        tmp_path / "drafter",
        card="---\nlicense: mit\n---\n",
    )
    (verdict,) = exported(
        str(tmp_path / "drafter"), "block", "debug", {"custom_generate": tmp_path / "out"}, device="cpu", limit=1,
        max_new_tokens=8,
    )  # fmt: skip
    assert verdict.same and len(verdict.lines) == 3, verdict.lines
    card = (tmp_path / "out" / "README.md").read_text()
    assert "custom_generate]" in card and "trust_remote_code=True" in card and "license: mit" in card
    names = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {
        "custom_generate/generate.py",
        "custom_generate/checks.py",
        "custom_generate/drafter.py",
        "custom_generate/requirements.txt",
    } < names
    load_drafter(tmp_path / "out", load_target("debug", "float32", "cpu"))


def test_a_target_out_of_bf16(tmp_path: Path) -> None:
    """Its head stays in bf16, and what is written is in its model's type."""
    target = load_target("debug", "float32", "cpu")
    target.model.bfloat16().save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    spec = str(tmp_path / "target")
    save_drafter(block_network(load_target(spec, "float32", "cpu"), "shared_kv"), tmp_path / "drafter")
    (verdict,) = exported(
        str(tmp_path / "drafter"), "block", spec, {"custom_generate": tmp_path / "out"}, device="cpu", limit=1,
        max_new_tokens=8,
    )  # fmt: skip
    assert verdict.same, verdict.lines


@pytest.mark.parametrize("fault", ["a tensor", "the code"])
def test_planted_faults(tmp_path: Path, target: Target, fault: str) -> None:
    drafter, out = overfit_block_network(target, PROMPT), tmp_path / "out"
    FORMATS["custom_generate"].write(drafter, out, torch.float32, "")
    if fault == "a tensor":
        held = load_file(out / "model.safetensors")
        held["layers.0.self_attn.k_norm.weight"] = held["layers.0.self_attn.k_norm.weight"].flip(0) * 3
        save_file(held, out / "model.safetensors")
    else:
        source = out / "custom_generate" / "drafter.py"
        source.write_text(
            source.read_text().replace('"rms_norm_eps"', '"rms_norm_eps"] + self.config["head_dim"')
        )
    verdict = Verdict("custom_generate", out)
    FORMATS["custom_generate"].compare(
        drafter,
        verdict,
        stock_model(target),
        decoded(target, BlockProposer(drafter, tree_nodes=0), [PROMPT], 20),
    )
    assert not verdict.same
    assert ("k_norm.weight differs" in verdict.lines[0]) == (fault == "a tensor")
    assert "1 of 1 prompt as plain" in verdict.lines[1]  # whatever the drafter, the output stays
    assert "0 of 1 prompt accepted" in verdict.lines[2]


def test_what_the_format_does_not_hold(target: Target) -> None:
    last = block_network(
        target, "taps", options={"target_layers": [0, target.num_layers - 1], "block_layout": "fill_in"}
    )
    with pytest.raises(UserError, match="is the target's last"):
        FORMATS["custom_generate"].make(last)
    recurrent = tiny_target("qwen3_next")
    with pytest.raises(UserError, match="keeps a state"):
        FORMATS["custom_generate"].make(block_network(recurrent, "taps", whole=True))
    with pytest.raises(
        UserError, match="can't run 'longcat_flash', use decode.custom_generate here: .* this has 8"
    ):
        FORMATS["custom_generate"].make(block_network(tiny_target("longcat_flash"), "taps", whole=True))


def test_the_trial_leaves_the_target_as_it_was(target: Target) -> None:
    before = Decoder(target).generate(PROMPT, max_new_tokens=8).tokens
    kept = target.model.config._attn_implementation
    FORMATS["custom_generate"].make(block_network(target, "shared_kv"))
    assert target.model.config._attn_implementation == kept
    assert Decoder(target).generate(PROMPT, max_new_tokens=8).tokens == before
