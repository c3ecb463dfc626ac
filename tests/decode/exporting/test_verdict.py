"""A verdict is that of all its comparisons."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from align.target.model import Target
from decode.drafters.autoregressive import AutoregressiveDrafter
from decode.engine.decoder import Decoder
from decode.exporting.verdict import Counts, Decoded, Verdict, decoded
from tests.builders import PROMPT


def test_one_difference_decides() -> None:
    verdict = Verdict("dflash", Path("out"))
    for same in (True, False, True):
        verdict.add("a reader", same, "a rung")
    assert not verdict.same and verdict.lines == ["a reader: a rung"] * 3


def test_counts_since() -> None:
    later = Counts(10, 40, 12, (8, 3, 1)).since(Counts(4, 16, 2, (2,)))
    assert later == Counts(6, 24, 10, (6, 3, 1)) and later.tau == 1 + 10 / 6 and Counts().tau == 1


def test_counts_of_outputs() -> None:
    found = Counts.of([[2, 0, 1], [], [4]], 4)
    assert found == Counts(4, 16, 7, (3, 2, 1, 1)) and found.tau == 1 + 7 / 4
    assert found.line == "4 calls, τ 2.750, accepted at each position 3 2 1 1"


@pytest.mark.parametrize(
    ("ours", "theirs", "parted", "same"),
    [
        ((416, 114, 17, 1, 0), (416, 117, 19, 1, 0), 0.0, True),  # measured: docs/results.md
        ((417, 114, 17, 1, 0), (415, 117, 19, 1, 0), 0.0, True),
        ((146, 35, 7, 0, 0), (146, 35, 7, 0, 0), 0.0, True),
        ((522, 39, 3, 0, 0), (533, 28, 3, 0, 0), 0.0, False),  # vLLM's fault
        ((420, 16, 0, 0, 0), (420, 0, 0, 0, 0), 0.0, False),  # τ 1.04
        ((146, 6, 0, 0, 0), (152, 0, 0, 0, 0), 0.0, False),
        ((420, 16, 0, 0, 0), (420, 0, 0, 0, 0), 1.0, False),
        ((416, 114, 17, 1, 0), (416, 132, 0, 0, 0), 0.0, False),  # as many, at other positions
        ((416, 114, 17, 1, 0), (416, 128, 17, 1, 0), 0.25, True),  # a quarter of the texts part
        ((208, 57, 8, 0, 0), (416, 114, 17, 1, 0), 0.0, True),  # of twice the calls
        ((10, 0), (0, 0), 0.0, False),
        ((0, 0), (0, 0), 0.0, True),
        ((416, 114, 17, 1), (416,), 0.0, False),
    ],
)
def test_accepted_drafts_are_compared_at_each_position(
    ours: tuple[int, ...], theirs: tuple[int, ...], parted: float, same: bool
) -> None:
    own, other = (Counts(c, 4 * c, sum(at), tuple(map(float, at))) for c, *at in (ours, theirs))
    assert own.alike(other, parted) is same
    nowhere = Counts(other.calls, other.drafted, other.accepted)
    assert own.alike(nowhere, parted) is same or sum(ours[1:]) == sum(theirs[1:])


def texts_of(*accepted: list[int]) -> Decoded:
    """Outputs as long as the accepted drafts of their calls make them."""
    outputs = [[3 + i] * (1 + sum(a) + len(a)) for i, a in enumerate(accepted)]
    return Decoded([[1]] * len(accepted), outputs, accepted)


def test_whole_outputs_are_alike_up_to_near_ties() -> None:
    texts = texts_of([1] * 60, [0] * 60)
    assert texts.as_plain([[3] * 121, [4] * 60 + [5]]) == 1
    same, line = texts.alike([[1] * 60, [0] * 59 + [1]], 4)
    assert same and line.startswith("1 of 2 prompts accepted call for call alike; ours: 120 calls, τ 1.500")
    assert not texts.alike([[1] * 60, [0] * 55 + [1] * 5], 4)[0]
    rare = texts_of([0] * 120 + [1] * 4)
    assert rare.alike([[0] * 120 + [1] * 4], 4)[0] and not rare.alike([[0] * 128], 4)[0]


@pytest.mark.parametrize("accepted", [[2, 0, 3], [1], [0, 4]])
def test_an_accepted_end_of_text_counts_as_ps_own(accepted: list[int]) -> None:
    """A call that accepts it writes no token of p's; a reader that is asked for the output's tokens takes it as p's."""
    text = texts_of(accepted)
    ended = replace(text, outputs=[text.outputs[0][:-1]])
    as_ps = [*accepted[:-1], accepted[-1] - 1]
    for ours, theirs, other in ((text, accepted, as_ps), (ended, as_ps, accepted)):
        same, line = ours.alike([theirs], 4)
        assert same and line.startswith("1 of 1 prompt accepted call for call alike"), line
        assert not ours.alike([other], 4)[0]


def test_outputs_that_end_early_are_counted_as_the_engine_writes_them(target: Target) -> None:
    """Whatever ends an output, the drafts accepted in its last call are known from its length."""
    free = Decoder(target).generate(PROMPT, max_new_tokens=12).tokens
    for length in range(1, len(free) + 1):
        ending = copy.copy(target)
        for eos, limit in ((free[length - 1], 12), (-1, length)):
            ending.eos_ids = (eos,)
            texts = decoded(ending, AutoregressiveDrafter(target, 3), [PROMPT], limit)
            (output,), (accepted,) = texts.outputs, texts.accepted
            asked = Decoder(ending, AutoregressiveDrafter(target, 3)).generate(
                PROMPT, max_new_tokens=len(output)
            )
            assert texts.alike([asked.accepted], 3)[1].startswith("1 of 1"), (output, accepted)
