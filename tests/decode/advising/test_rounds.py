"""Times between calls: rounds alone, of one batch, without the reading of prompts."""

from __future__ import annotations

import torch

from align.target.loading import load_target
from decode.advising.rounds import Rounds, timed_rounds
from decode.engine.decoder import Decoder


def test_rounds_are_counted_by_their_batch_and_prompts_are_none() -> None:
    target = load_target("debug")
    with timed_rounds(target) as found:
        for _ in range(2):
            Decoder(target).generate([5, 6, 7], max_new_tokens=5, min_new_tokens=5)
        Decoder(target).generate_batch(
            [[5, 6], [7, 8, 9]], batch_size=2, max_new_tokens=[4, 6], min_new_tokens=4
        )
    # five tokens: one of the prompt's call, four calls, three times between; the second request goes on alone for one time
    assert {batch: len(times) for batch, times in found.between.items()} == {1: 2 * 3 + 1, 2: 2}
    assert (found.beside(1) or 0) > 0 and found.beside(3) is None
    assert "forward" not in vars(target) and "forward_together" not in vars(target)


def test_a_batch_that_runs_one_by_one_is_one_call() -> None:
    target, rounds = load_target("debug"), Rounds()
    inner = rounds.timed(target, lambda tokens: tokens)
    outer = rounds.timed(target, lambda tokens: [inner(one) for one in tokens])
    for _ in range(3):
        outer([torch.zeros(1, 1), torch.zeros(1, 1)])
    assert {batch: len(times) for batch, times in rounds.between.items()} == {2: 2}
