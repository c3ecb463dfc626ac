"""DSpark's heads, read and written, compute what their formulas say; what is not computed here is refused."""

from pathlib import Path

import pytest
import torch

from specalign.common.errors import UserError
from specalign.formats.block import load_drafter, save_drafter
from specalign.formats.dspark import make_dspark, take_heads, write_heads
from specalign.lm.model import Target
from tests.builders import block_network
from tests.published_blocks import backbone, dspark_config, markov_tensors, write

HERE = Path("here")


@pytest.mark.parametrize("kind", ["linear", "vanilla", "none"])
@pytest.mark.parametrize("confidence", [False, True])
def test_written_heads_compute_the_same(target: Target, kind: str, confidence: bool) -> None:
    """By DSpark's definition."""
    options = {"confidence_head": confidence, "block_layout": "anchor_first"}
    options |= {} if kind == "none" else {"markov_rank": 4, "markov": kind}
    drafter = block_network(target, "taps", options=options)
    with torch.no_grad():
        for module in (drafter.markov, drafter.confidence):
            for parameter in [] if module is None else module.parameters():
                parameter.copy_(torch.randn(parameter.shape))
    tensors = write_heads(drafter)
    t = {name.removeprefix("markov_head."): tensor for name, tensor in tensors.items()}
    w1, w2 = t["markov_w1.weight"], t["markov_w2.weight"]
    hidden, before = torch.randn(5, target.hidden_size), torch.tensor([0, 3, 11, 3, 7])
    ours = torch.zeros(5, drafter.draft_size)
    if drafter.markov is not None:
        ours = drafter.markov(hidden, before, target.embed) @ drafter.markov.basis
    torch.testing.assert_close(w1[before] @ w2.T, ours, atol=1e-4, rtol=1e-4)
    if drafter.confidence is not None:
        weight, bias = t["confidence_head.proj.weight"][0], t["confidence_head.proj.bias"]
        wanted = drafter.confidence(hidden, drafter.confidence_inputs(before))
        got = torch.cat((hidden, w1[before]), dim=1) @ weight + bias
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["silu", "tanh", "gated"])
def test_other_heads_are_refused(target: Target, kind: str) -> None:
    options = {"markov_rank": 4, "markov": kind, "block_layout": "anchor_first"}
    with pytest.raises(UserError, match="train with drafter.markov=vanilla or linear"):
        make_dspark(block_network(target, "taps", options=options))  # fmt: skip


def test_read_heads_that_do_not_fit(target: Target) -> None:
    held = markov_tensors(target, "rnn", 4, 9, stateless=False)
    with pytest.raises(UserError, match=r"joint_proj.weight: its output reads the state"):
        take_heads(held, {"markov_rank": 4, "markov": "rnn"}, HERE)
    with pytest.raises(UserError, match=r"missing tensor 'markov_head.markov_w1.weight'"):
        take_heads({}, {"markov_rank": 4, "markov": "vanilla"}, HERE)
    held = markov_tensors(target, "vanilla", 1, 9)
    held["markov_head.markov_w2.weight"].zero_()
    found = take_heads(held, {"markov_rank": 1, "markov": "vanilla"}, HERE)
    assert found == ({"markov_rank": 0, "markov": ""}, {}) and not held


@pytest.mark.parametrize("reads", ["markov", "hidden"])
def test_read_confidence_by_its_formula(tmp_path: Path, target: Target, reads: str) -> None:
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
