"""Statistics against hand-worked numbers, and the interval's coverage."""

import math

import numpy as np
import pytest

from decode.evaluation import statistics as stats
from decode.evaluation.records import Record
from tests.measurements import record


def micro_and_macro(rows: list[Record], method: str = "plain") -> tuple[float | None, float | None]:
    counted = stats.counts(rows, method)
    micro = stats.tau(counted)
    return micro and micro.value, stats.tau_macro(counted)


def test_speed_up_is_the_ratio_of_mean_times_per_token() -> None:
    rows = [
        record("plain", "a", 2.0, 10), record("plain", "b", 4.0, 10), record("plain", "c", 9.0, 10),
        record("drafter", "a", 1.0, 10), record("drafter", "b", 1.0, 5),
    ]  # fmt: skip
    estimate = stats.paired_ratio(stats.times(rows, "plain"), stats.times(rows, "drafter"))
    assert estimate is not None and estimate.prompts == 2  # c has no pair
    assert estimate.value == pytest.approx((0.2 + 0.4) / (0.1 + 0.2))
    assert stats.times(rows, "plain", stats.whole_time)["s", "a"] == pytest.approx(2.5 / 11)


def test_pairing_removes_what_the_prompts_share() -> None:
    baseline = {("s", str(i)): 1.0 + i for i in range(20)}
    method = {key: value / 1.5 for key, value in baseline.items()}
    estimate = stats.paired_ratio(baseline, method)
    assert estimate.lo == pytest.approx(1.5) and estimate.hi == pytest.approx(1.5)


def test_the_interval_covers_the_truth() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        base = generator.lognormal(0.0, 0.1, 40)
        gain = generator.lognormal(math.log(1.6), 0.2, 40)
        keys = [("s", str(i)) for i in range(40)]
        estimate = stats.paired_ratio(
            dict(zip(keys, base, strict=True)), dict(zip(keys, base / gain, strict=True))
        )
        truth = 1 / math.exp(
            -math.log(1.6) + 0.2**2 / 2
        )  # E[base] / E[base/gain], base and gain independent
        covered += estimate.lo <= truth <= estimate.hi
    assert 368 <= covered <= 392


def test_intervals_are_over_the_spread_within_each_suite() -> None:
    """Two suites without spread inside: the interval has no width, however far apart they are."""
    baseline = {(suite, str(i)): 1.0 for suite in "ab" for i in range(5)}
    method = {(suite, i): 0.5 if suite == "a" else 1.0 for suite, i in baseline}
    estimate = stats.paired_ratio(baseline, method)
    assert estimate.lo == estimate.value == estimate.hi == pytest.approx(10 / 7.5)


def test_tau_micro_and_macro() -> None:
    rows = [record(prompt="a", committed=30, calls=10), record(prompt="b", committed=10, calls=10)]
    rows.append(record(prompt="b", committed=10, calls=10, repeat=1))
    assert micro_and_macro(rows) == pytest.approx((50 / 30, 2.0))
    assert micro_and_macro([]) == (None, None)


@pytest.mark.parametrize(("count", "suites"), [(3, 1), (5, 1), (8, 1), (20, 1), (20, 4)])
def test_the_same_method_twice_is_no_difference_and_a_slower_one_is(
    count: int, suites: int
) -> None:
    """Prompts of different lengths, times with 6% noise; 1000 measurements."""
    generator = np.random.default_rng(7)
    same = slower = 0
    for _ in range(1000):
        noisy = generator.uniform(0.5, 2.0, count) * generator.lognormal(0, 0.06, (2, count))
        one, other = ({(str(i % suites), str(i)): x for i, x in enumerate(row)} for row in noisy)
        twice = stats.paired_ratio(one, other)
        slowed = stats.paired_ratio(one, {key: x / 0.8 for key, x in other.items()})
        same += twice.lo <= 1 <= twice.hi
        slower += slowed.hi < 1
    assert same >= 930 and (slower >= 950 or count < 8), (same, slower)


def test_the_interval_of_tau_is_over_prompts_with_their_repeats() -> None:
    rows = [record("m", "a", calls=5), record("m", "a", calls=3), record("m", "b", calls=8)]
    rows += [record("m", "c", committed=0, calls=0), record("plain", "a", calls=10)]
    counted = stats.counts(rows, "m")
    assert counted == {("s", "a"): (20, 8), ("s", "b"): (10, 8)}
    found = stats.tau(counted)
    assert found is not None and (found.value, found.lo, found.hi) == (30 / 16, None, None)
    found = stats.tau({**counted, ("s", "c"): (15, 8)})
    assert found is not None and found.value == 45 / 24
    logs = np.log([25 / 16, 35 / 16, 30 / 16])  # τ without a, b and c
    margin = 4.303 * math.sqrt(2 / 3 * ((logs - logs.mean()) ** 2).sum())
    assert math.log(found.hi / found.value) == pytest.approx(margin, rel=0.05)  # type: ignore[operator]
    assert found.lo * found.hi == pytest.approx(found.value**2)  # type: ignore[operator]
    assert stats.tau({}) is None


def test_turns_of_a_conversation_are_not_independent() -> None:
    talks = {("s", f"{i}{turn}"): (20 + i, 10) for i in range(6) for turn in ("", "#2", "#3")}
    first = {key: counted for key, counted in talks.items() if "#" not in key[1]}
    found, alone = stats.tau(talks), stats.tau(first)
    assert found is not None and alone is not None and found.prompts == 18
    assert (found.lo, found.hi) == (pytest.approx(alone.lo), pytest.approx(alone.hi))
    assert stats.tau({key: talks[key] for key in talks if key[1][0] in "01"}).lo is None
    issues = stats.tau({("s", f"issue#{i}"): counted for (_, i), counted in first.items()})
    assert issues is not None and issues.lo == pytest.approx(alone.lo)


def test_a_difference_of_tau_is_paired() -> None:
    base = {("s", str(i)): (100, 20 + 10 * i) for i in range(12)}
    better = {key: (100, calls * 0.8) for key, (_, calls) in base.items()}
    found = stats.tau_difference(base, better)  # type: ignore[arg-type]
    own = stats.tau(base)
    assert found is not None and own is not None and found.value == pytest.approx(own.value / 4)
    assert found.lo < found.value < found.hi  # type: ignore[operator]
    assert found.hi - found.lo < (own.hi - own.lo) / 2  # type: ignore[operator]
    assert stats.tau_difference(base, {("t", "0"): (1, 1)}) is None


def test_acceptance_by_position() -> None:
    row = record(committed=3 + 1 + 2, calls=3, accepted=[2, 0, 1], drafted=[3, 3, 3])
    first, second, third = stats.acceptance([row])
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
    assert [a.calls for a in stats.acceptance([row])] == [2, 2, 1]
    assert [a.unconditional for a in stats.acceptance([row])] == [1.0, 1.0, 1.0]
    whole = record(committed=4 + 3, calls=2, accepted=[3, 2], drafted=[3, 3], finish="length")
    assert [a.unconditional for a in stats.acceptance([whole])] == [1.0, 1.0, 0.5]


def test_prompts_decoded_together_share_one_time() -> None:
    rows = [
        record("plain", "a", 2.0, 10, batch=2, group="a"),
        record("plain", "b", 3.0, 20, batch=2, group="a"),
        record("drafter", "a", 1.0, 10, batch=2, group="a"),
        record("drafter", "b", 1.5, 20, batch=2, group="a"),
    ]
    assert stats.times(rows, "plain") == {("s", "a"): pytest.approx(3.0 / 30)}
    assert stats.throughput(rows, "drafter") == pytest.approx(20.0)
    rows += [record(name, "c", 9.0, 10, batch=2) for name in ("plain", "drafter")]  # not full
    assert stats.times(rows, "plain").keys() == {("s", "a")}
    assert stats.throughput(rows, "drafter") == 20.0
    ratio = stats.paired_ratio(stats.times(rows, "plain"), stats.times(rows, "drafter"))
    assert ratio.value == pytest.approx(2.0)


def test_scores_are_compared_in_pairs() -> None:
    rows = [record("plain", str(i), score=float(i % 2)) for i in range(20)]
    rows += [record("drafter", str(i), score=float(i % 2)) for i in range(20)]
    plain, drafted = stats.scores(rows, "plain"), stats.scores(rows, "drafter")
    gain = stats.score_difference(plain, drafted, identical=True)
    assert (gain.value, gain.lo, gain.hi) == (0.0, 0.0, 0.0)
    assert stats.mean_score(plain).value == 0.5
    few = dict.fromkeys(list(plain)[:3], 0.0)
    gain = stats.score_difference(few, few)
    assert gain.hi == -gain.lo == pytest.approx(1 - 0.05 ** (1 / 3))
    assert (stats.mean_score(few).lo, stats.mean_score(few).hi) == (0.0, gain.hi)


@pytest.mark.parametrize("count", [5, 20])
def test_the_interval_covers_a_rare_loss(count: int) -> None:
    """Sampled answers of which the method loses one in twenty."""
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        plain = {("s", str(i)): float(x < 0.05) for i, x in enumerate(generator.random(count))}
        gain = stats.score_difference(plain, dict.fromkeys(plain, 0.0))
        covered += gain.lo <= -0.05 <= gain.hi
    assert covered >= 380
