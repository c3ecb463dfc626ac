"""Statistics against hand-worked numbers, and the interval's coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decode.evaluation import statistics
from decode.evaluation.records import Record
from decode.evaluation.statistics import (
    acceptance,
    counts,
    mean_score,
    paired_ratio,
    score_difference,
    scores,
    tau,
    tau_difference,
    tau_macro,
    throughput,
    times,
    whole_time,
)
from tests.measurements import record


def micro_and_macro(rows: list[Record], method: str = "plain") -> tuple[float | None, float | None]:
    counted = counts(rows, method)
    micro = tau(counted)
    return micro and micro.value, tau_macro(counted)


def test_speed_up_is_the_ratio_of_mean_times_per_token() -> None:
    rows = [
        record("plain", "a", 2.0, 10), record("plain", "b", 4.0, 10), record("plain", "c", 9.0, 10),
        record("drafter", "a", 1.0, 10), record("drafter", "b", 1.0, 5),
    ]  # fmt: skip
    estimate = paired_ratio(times(rows, "plain"), times(rows, "drafter"))
    assert estimate is not None and estimate.prompts == 2  # c has no pair
    assert estimate.value == pytest.approx((0.2 + 0.4) / (0.1 + 0.2))
    assert times(rows, "plain", whole_time)["s", "a"] == pytest.approx(2.5 / 11)


def test_pairing_removes_what_the_prompts_share() -> None:
    baseline = {("s", str(i)): 1.0 + i for i in range(20)}
    method = {key: value / 1.5 for key, value in baseline.items()}
    estimate = paired_ratio(baseline, method)
    assert estimate.lo == pytest.approx(1.5) and estimate.hi == pytest.approx(1.5)


def test_the_interval_covers_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.evaluation.statistics.RESAMPLES", 2000)
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        base = generator.lognormal(0.0, 0.1, 40)
        gain = generator.lognormal(math.log(1.6), 0.2, 40)
        keys = [("s", str(i)) for i in range(40)]
        estimate = paired_ratio(
            dict(zip(keys, base, strict=True)), dict(zip(keys, base / gain, strict=True)), trial
        )
        truth = 1 / math.exp(
            -math.log(1.6) + 0.2**2 / 2
        )  # E[base] / E[base/gain], base and gain independent
        covered += estimate.lo <= truth <= estimate.hi
    assert 180 <= covered <= 200


def test_each_suite_is_resampled_within_itself() -> None:
    """Two suites without spread inside: the interval has no width, however far apart they are."""
    baseline = {(suite, str(i)): 1.0 for suite in "ab" for i in range(5)}
    method = {(suite, i): 0.5 if suite == "a" else 1.0 for suite, i in baseline}
    estimate = paired_ratio(baseline, method)
    assert estimate.lo == estimate.value == estimate.hi == pytest.approx(10 / 7.5)


def test_tau_micro_and_macro() -> None:
    rows = [record(prompt="a", committed=30, calls=10), record(prompt="b", committed=10, calls=10)]
    rows.append(record(prompt="b", committed=10, calls=10, repeat=1))
    assert micro_and_macro(rows) == pytest.approx((50 / 30, 2.0))
    assert micro_and_macro([]) == (None, None)


@pytest.mark.parametrize(
    ("count", "share"), [(8, 0.91), (20, 0.945), pytest.param(60, 0.945, marks=pytest.mark.slow)]
)
def test_the_same_method_twice_is_no_difference_and_a_slower_one_is(
    count: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths, times with 6% noise; 400 measurements."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    generator = np.random.default_rng(7)
    same = slower = 0
    for seed in range(400):
        noisy = generator.uniform(0.5, 2.0, count) * generator.lognormal(0, 0.06, (2, count))
        one, other = ({("s", str(i)): float(x) for i, x in enumerate(row)} for row in noisy)
        twice = paired_ratio(one, other, seed)
        slowed = paired_ratio(one, {key: x / 0.8 for key, x in other.items()}, seed)
        assert twice is not None and slowed is not None
        same += twice.lo <= 1 <= twice.hi  # type: ignore[operator]
        slower += slowed.hi < 1  # type: ignore[operator]
    assert same >= share * 400 and slower >= 0.99 * 400, (same, slower)


def test_the_interval_of_tau_resamples_prompts_with_their_repeats() -> None:
    rows = [record("m", "a", calls=5), record("m", "a", calls=3), record("m", "b", calls=8)]
    rows += [record("m", "c", committed=0, calls=0), record("plain", "a", calls=10)]
    counted = counts(rows, "m")
    assert counted == {("s", "a"): (20, 8), ("s", "b"): (10, 8)}
    found = tau(counted)
    assert found is not None and found.value == 30 / 16
    assert found.lo == 10 / 8 and found.hi == 20 / 8  # all of one prompt or all of the other
    alone = tau({("s", "a"): (20, 8)})
    assert alone is not None and (alone.value, alone.lo, alone.hi) == (2.5, None, None)
    assert tau({}) is None


def test_a_difference_of_tau_is_paired() -> None:
    base = {("s", str(i)): (100, 20 + 10 * i) for i in range(12)}
    better = {key: (100, calls * 0.8) for key, (_, calls) in base.items()}
    found = tau_difference(base, better)  # type: ignore[arg-type]
    own = tau(base)
    assert found is not None and own is not None and found.value == pytest.approx(own.value / 4)
    assert found.lo == pytest.approx(own.lo / 4) and found.hi == pytest.approx(own.hi / 4)  # type: ignore[operator]
    assert found.hi - found.lo < (own.hi - own.lo) / 2  # type: ignore[operator]
    assert tau_difference(base, {("t", "0"): (1, 1)}) is None


def test_acceptance_by_position() -> None:
    row = record(committed=3 + 1 + 2, calls=3, accepted=[2, 0, 1], drafted=[3, 3, 3])
    first, second, third = acceptance([row])
    assert (first.calls, first.unconditional, first.conditional) == (
        3,
        pytest.approx(2 / 3),
        pytest.approx(2 / 3),
    )
    assert (second.unconditional, second.conditional) == (
        pytest.approx(1 / 3),
        pytest.approx(1 / 2),
    )
    assert (third.unconditional, third.conditional) == (0.0, 0.0)


def test_a_cut_call_says_nothing_about_the_tokens_after_the_cut() -> None:
    """The last call kept 2 drafts and then the output ended: the third was never judged."""
    row = record(committed=4 + 2, calls=2, accepted=[3, 2], drafted=[3, 3], finish="eos")
    assert [a.calls for a in acceptance([row])] == [2, 2, 1]
    assert [a.unconditional for a in acceptance([row])] == [1.0, 1.0, 1.0]
    whole = record(committed=4 + 3, calls=2, accepted=[3, 2], drafted=[3, 3], finish="length")
    assert [a.unconditional for a in acceptance([whole])] == [1.0, 1.0, 0.5]


def test_prompts_decoded_together_share_one_time() -> None:
    rows = [
        record("plain", "a", 2.0, 10, batch=2, group="a"),
        record("plain", "b", 3.0, 20, batch=2, group="a"),
        record("drafter", "a", 1.0, 10, batch=2, group="a"),
        record("drafter", "b", 1.5, 20, batch=2, group="a"),
    ]
    assert times(rows, "plain") == {("s", "a"): pytest.approx(3.0 / 30)}
    assert throughput(rows, "drafter") == pytest.approx(20.0)
    assert paired_ratio(times(rows, "plain"), times(rows, "drafter")).value == pytest.approx(2.0)


def test_scores_are_compared_in_pairs() -> None:
    rows = [record("plain", str(i), score=float(i % 2)) for i in range(20)]
    rows += [record("drafter", str(i), score=float(i % 2)) for i in range(20)]
    gain = score_difference(scores(rows, "plain"), scores(rows, "drafter"))
    assert (gain.value, gain.lo, gain.hi) == (0.0, 0.0, 0.0)
    assert mean_score(scores(rows, "plain")).value == 0.5
