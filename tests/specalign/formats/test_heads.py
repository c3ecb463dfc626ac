"""DSpark's heads: what they compute here is what their formulas say of the tensors; what is not computed here is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specalign.common.errors import UserError
from specalign.formats.block import load_drafter, save_drafter
from specalign.formats.heads import take_heads
from specalign.lm.model import Target
from tests.published_blocks import backbone, dspark_config, markov_tensors, write

HERE = Path("here")


def test_a_state_that_is_read_is_refused(target: Target) -> None:
    settings = {"markov_rank": 4, "markov": "rnn"}
    held = markov_tensors(target, "rnn", 4, 9, stateless=False)
    with pytest.raises(UserError, match=r"joint_proj.weight: its output reads the state"):
        take_heads(held, settings, target.hidden_size, HERE)


def test_missing_and_misshapen_tensors_are_named(target: Target) -> None:
    width = target.hidden_size
    with pytest.raises(UserError, match=r"misses 'markov_head.markov_w1.weight'"):
        take_heads({}, {"markov_rank": 4, "markov": "vanilla"}, width, HERE)
    with pytest.raises(
        UserError, match=r"markov_w1.weight has shape \(260, 4\), expected \(any, 5\)"
    ):
        held = {
            **markov_tensors(target, "vanilla", 4, 9),
            "markov_head.markov_w1.weight": torch.ones(260, 4),
        }
        take_heads(held, {"markov_rank": 5, "markov": "vanilla"}, width, HERE)
    with pytest.raises(UserError, match=r"markov_w2.weight has shape \(\), expected \(any, 5\)"):
        held = {
            **markov_tensors(target, "vanilla", 5, 9),
            "markov_head.markov_w2.weight": torch.tensor(1.0),
        }
        take_heads(held, {"markov_rank": 5, "markov": "vanilla"}, width, HERE)
    with pytest.raises(UserError, match="misses 'confidence_head.proj.weight'"):
        take_heads({}, {"markov_rank": 0, "confidence_head": True}, width, HERE)


def test_a_head_that_says_nothing_is_none(target: Target) -> None:
    held = markov_tensors(target, "vanilla", 1, 9)
    held["markov_head.markov_w2.weight"].zero_()
    found = take_heads(held, {"markov_rank": 1, "markov": "vanilla"}, target.hidden_size, HERE)
    assert found.settings == {"markov_rank": 0, "markov": ""} and not found.tensors and not held


@pytest.mark.parametrize("reads", ["markov", "hidden"])
def test_confidence_by_its_formula(tmp_path: Path, target: Target, reads: str) -> None:
    """σ(w·[h; W1[x]] + b), or of h alone; kept through this project's own folder."""
    rank, width = 6, target.hidden_size
    held = backbone(target) | markov_tensors(target, "gated", rank, target.vocab_size)
    size = width + (rank if reads == "markov" else 0)
    weight, bias = torch.randn(1, size), torch.randn(1)
    held |= {"confidence_head.proj.weight": weight, "confidence_head.proj.bias": bias}
    options = {"enable_confidence_head": True, "confidence_head_with_markov": reads == "markov"}
    folder = write(tmp_path / "theirs", dspark_config(target, "gated", rank, **options), held)
    drafter = load_drafter(folder, target)
    save_drafter(drafter, tmp_path / "ours", dtype=torch.float32)
    h, x = torch.randn(3, width), torch.tensor([4, 90, 17])
    row = held["markov_head.markov_w1.weight"][x]
    wanted = torch.cat((h, row) if reads == "markov" else (h,), dim=-1) @ weight[0] + bias
    for one in (drafter, load_drafter(tmp_path / "ours", target)):
        assert one.confidence is not None
        torch.testing.assert_close(one.confidence(h, one.confidence_inputs(x)), wanted)
