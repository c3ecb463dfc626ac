"""Figures of one generation by their definitions."""

from __future__ import annotations

from decode.engine.output import Generation, Tree


def test_figures_of_a_generation() -> None:
    trees = [None, Tree((-1, -1, 0), [0, 2])]
    out = Generation([1, 2, 3, 4, 5, 6], "", 3, "length", 2, [2, 2], trees, [1, 2], seconds=2.5)
    assert out.nodes == [2, 3] and out.tau == 2.5 and out.tokens_per_second == 2.0


def test_without_a_call_or_time_there_is_no_speed() -> None:
    assert Generation([1, 2], "", 3, "length", calls=1).tokens_per_second == 0.0
    out = Generation([1], "", 3, "length")
    assert (out.nodes, out.tau, out.tokens_per_second) == ([], 0.0, 0.0)
    assert repr(out).endswith("no speed>")
    assert out.seconds == out.prefill_seconds == out.draft_seconds == out.verify_seconds == 0.0


def test_shown_it_is_one_short_line() -> None:
    out = Generation(
        [*range(5000)], "word\n" * 5000, 3, "length", 2, [2, 2], [None] * 2, [1, 2], seconds=2.5
    )
    assert (
        len(repr(out)) < 150
        and "5000 tokens (length), 2 calls" in repr(out)
        and "\n" not in repr(out)
    )
