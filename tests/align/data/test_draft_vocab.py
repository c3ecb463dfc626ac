"""The draft vocabulary by its definition."""

from __future__ import annotations

import pytest

from align.data.draft_vocab import coverage, frequent_tokens
from align.data.shards import from_lists
from align.target.model import Target


def test_the_most_frequent_tokens_of_answers_and_every_end_of_sequence(target: Target) -> None:
    samples = from_lists([[50, 50, 50, 9, 9, 7, 8], [50, 6, 9]], [3, 1], [1.0, 1.0])  # answers: 9 9 7 8, 6 9
    ids = frequent_tokens(samples, target, 3)
    assert ids is not None and ids.tolist() == sorted([6, 9, *target.eos_ids])  # 6 before 7 and 8, as often
    assert coverage(samples, ids, target) == pytest.approx(4 / 6)
    assert frequent_tokens(samples, target, 0) is None and coverage(samples, None, target) == 1.0
