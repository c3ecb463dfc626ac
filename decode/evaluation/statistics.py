"""Figures from records: paired speed-ups with intervals, τ, acceptance per position. numpy only.

Definitions (c = committed tokens: those after the first one, which the prefill gives):

    time per token of a prompt   mean over repeats of seconds / c; prefill excluded
    speed-up                     mean over prompts of plain decoding's time per token / the method's
    its interval                 of its logarithm, by a jackknife that leaves out a conversation, in
                                 both methods, at a time (Efron & Tibshirani 1993, 11), and Student's t
    τ, micro                     Σ c / Σ calls; its interval is computed alike
    τ, macro                     mean over prompts of the prompt's own Σ c / Σ calls
    acceptance at position k     of the calls that drafted at least k tokens: the share that
                                 accepted the k-th (unconditional), and that share among the calls
                                 that accepted the first k−1 (conditional)

A prompt whose output ended with the prefill's token is left out of times and τ, and one that was
decoded in a batch that was not full out of times.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, sqrt
from statistics import NormalDist

import numpy as np

from decode.evaluation.records import Record
from specalign.suites.prompt import TURN

FEWEST = 5  # prompts of a suite below which they do not show its spread
_BOUNDED = 3  # conversations from which a figure has an interval
LEVEL = 0.95  # of all intervals
PromptKey = tuple[str, str]
Counts = Mapping[PromptKey, tuple[int, int]]
"""(suite, prompt) → committed tokens and target calls of a method, over its repeats."""


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval; `lo` and `hi` are None where there are too few prompts."""

    value: float
    lo: float | None
    hi: float | None
    prompts: int


@dataclass(frozen=True)
class Acceptance:
    """Acceptance at one drafted position, 1 = the first.

    calls: those that drafted that many tokens and whose verdict on this one is known.
    conditional: None where no call accepted everything before.
    """

    position: int
    calls: int
    unconditional: float
    conditional: float | None


def list_units(records: Iterable[Record], method: str) -> list[list[Record]]:
    """A method's records, those that were decoded together in one list: a time is measured of
    each. Batches that were not full, and those whose outputs all ended with the prefill's token,
    are left out."""
    units: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record.method == method:
            units[record.suite, record.group, record.repeat, record.batch].append(record)
    full = [unit for unit in units.values() if len(unit) == unit[0].batch]
    return [unit for unit in full if any(one.committed for one in unit)]


def decode_time(unit: Sequence[Record]) -> float:
    """Seconds per committed token, prefill excluded."""
    return max(one.seconds for one in unit) / sum(one.committed for one in unit)


def whole_time(unit: Sequence[Record]) -> float:
    """Seconds per new token, prefill included."""
    whole = max(one.seconds + one.prefill_seconds for one in unit)
    return whole / sum(one.new_tokens for one in unit)


def times(
    records: Iterable[Record], method: str, time: Callable[[Sequence[Record]], float] = decode_time
) -> dict[PromptKey, float]:
    """(suite, prompt) → that method's mean time per token over its repeats; of prompts that were
    decoded together, under the first one."""
    collected: defaultdict[PromptKey, list[float]] = defaultdict(list)
    for unit in list_units(records, method):
        collected[unit[0].suite, unit[0].group].append(time(unit))
    return {key: float(np.mean(values)) for key, values in collected.items()}


def throughput(records: Iterable[Record], method: str) -> float | None:
    """Committed tokens per second of decoding; None without a time."""
    units = list_units(records, method)
    seconds = sum(max(one.seconds for one in unit) for unit in units)
    return sum(one.committed for unit in units for one in unit) / seconds if seconds > 0 else None


def counts(records: Iterable[Record], method: str) -> dict[PromptKey, tuple[int, int]]:
    """The `Counts` of a method; prompts without a call are left out."""
    found: defaultdict[PromptKey, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for record in records:
        if record.method == method and record.calls:
            committed, calls = found[record.suite, record.prompt]
            total = (committed + record.committed, calls + record.calls)
            found[record.suite, record.prompt] = total
    return dict(found)


def _estimate(
    rows: Mapping[PromptKey, Sequence[float]],
    compute: Callable[[np.ndarray], np.ndarray],
    positive: bool = True,
) -> Estimate | None:
    """A figure with its interval over conversations, whose turns depend on each other; stratified by
    suite, unless one has fewer than `FEWEST`. None without prompts. `compute`: the sums of the
    prompts' K numbers, (..., K), to the figure, (...). positive: the interval is symmetric in the
    figure's logarithm."""
    if not rows:
        return None
    conversations = _sum_turns(rows)
    values_NK = np.array([*conversations.values()])
    sums_K = values_NK.sum(axis=0)
    value = float(compute(sums_K))
    unbounded = Estimate(value, None, None, len(rows))
    if len(conversations) < _BOUNDED:
        return unbounded
    names = [suite for suite, _ in conversations]
    if min(Counter(names).values()) < FEWEST:
        names = [""] * len(names)
    total = uncertainty = 0.0
    for name in dict.fromkeys(names):
        stratum = values_NK[[other == name for other in names]]
        df = len(stratum) - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            left_out = compute(sums_K - (stratum - stratum.mean(axis=0)) * (df + 1) / df)
            variance = df * float(np.var(np.log(left_out) if positive else left_out))
        total += variance
        uncertainty += variance**2 / df
    margin = _student_t(total**2 / uncertainty) * sqrt(total) if total else 0.0
    lo, hi = value - margin, value + margin
    if positive:
        lo, hi = value * np.exp([-margin, margin])
    return Estimate(value, float(lo), float(hi), len(rows)) if isfinite(hi) else unbounded


def _sum_turns(rows: Mapping[PromptKey, Sequence[float]]) -> dict[PromptKey, np.ndarray]:
    """First prompt of a conversation → the sums of its turns' numbers."""
    conversations: dict[PromptKey, np.ndarray] = {}
    for suite, prompt in sorted(rows):
        first = (suite, prompt.rpartition(TURN)[0])
        key = first if first in rows else (suite, prompt)
        numbers_K = np.array(rows[suite, prompt], dtype=float)
        conversations[key] = conversations.get(key, 0.0) + numbers_K
    return conversations


def _student_t(df: float) -> float:
    """The quantile of Student's t that bounds an interval (Wallace 1959, inverted)."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2) * (8 * df + 3) / (8 * df + 1)
    return sqrt(df * (exp(z**2 / df) - 1))


def paired_ratio(
    baseline: Mapping[PromptKey, float], method: Mapping[PromptKey, float]
) -> Estimate | None:
    """mean(baseline) / mean(method) over the prompts that both have; None when they share none."""
    pairs = {key: (baseline[key], method[key]) for key in baseline.keys() & method.keys()}
    return _estimate(pairs, lambda sums: sums[..., 0] / sums[..., 1])


def tau(counted: Counts) -> Estimate | None:
    """Micro τ; None without a call."""
    return _estimate(counted, lambda sums: sums[..., 0] / sums[..., 1])


def tau_macro(counted: Counts) -> float | None:
    """Macro τ; None without a call."""
    if not counted:
        return None
    return float(np.mean([committed / calls for committed, calls in counted.values()]))


def tau_difference(baseline: Counts, method: Counts) -> Estimate | None:
    """The method's micro τ minus the baseline's over the prompts that both have; None where they
    share none."""
    return _estimate(
        _pair_counts(baseline, method),
        lambda sums: sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1],
        positive=False,
    )


def accepted_ratio(baseline: Counts, method: Counts) -> Estimate | None:
    """The method's accepted tokens a call, micro τ − 1, over the baseline's, over the prompts that
    both have; None where they share none, or the baseline has none accepted."""
    both = _pair_counts(baseline, method)
    if not sum(committed - calls for committed, calls, *_ in both.values()):
        return None
    return _estimate(
        both, lambda sums: (sums[..., 2] / sums[..., 3] - 1) / (sums[..., 0] / sums[..., 1] - 1)
    )


def _pair_counts(baseline: Counts, method: Counts) -> dict[PromptKey, tuple[int, int, int, int]]:
    return {key: (*baseline[key], *method[key]) for key in baseline.keys() & method.keys()}


def scores(records: Iterable[Record], method: str) -> dict[PromptKey, float]:
    """(suite, prompt) → the mean score of that method's answers over its repeats."""
    collected: defaultdict[PromptKey, list[float]] = defaultdict(list)
    for record in records:
        if record.method == method and record.score is not None:
            collected[record.suite, record.prompt].append(record.score)
    return {key: float(np.mean(values)) for key, values in collected.items()}


def mean_score(found: Mapping[PromptKey, float]) -> Estimate | None:
    """The mean score over prompts; None without any."""
    return _mean(found, least=0.0)


def score_difference(
    baseline: Mapping[PromptKey, float], method: Mapping[PromptKey, float], identical: bool = False
) -> Estimate | None:
    """The method's mean score minus the baseline's, over the prompts that both have, in pairs.
    identical: their outputs are."""
    both = baseline.keys() & method.keys()
    found = _mean({key: method[key] - baseline[key] for key in both}, least=-1.0)
    if identical and found is not None and found.lo is not None:
        return replace(found, lo=found.value, hi=found.value)
    return found


def _mean(values: Mapping[PromptKey, float], least: float) -> Estimate | None:
    """The mean of values from `least` to 1. Where all are equal, others may be as frequent as what N
    draws miss with probability 1 − LEVEL (the rule of three)."""
    rows = {key: (value, 1.0) for key, value in values.items()}
    found = _estimate(rows, lambda sums: sums[..., 0] / sums[..., 1], positive=False)
    if found is None or found.lo is None or found.hi is None:
        return found
    unseen = 1 - (1 - LEVEL) ** (1 / len(values)) if len(set(values.values())) == 1 else 0.0
    lo = found.lo - unseen * (found.value - least)
    hi = found.hi + unseen * (1 - found.value)
    return replace(found, lo=max(lo, least), hi=min(hi, 1.0))


def acceptance(records: Iterable[Record]) -> list[Acceptance]:
    """Acceptance per position, in order.

    An output cut at an end of sequence or a limit ends inside a call: the drafted tokens after the
    cut were neither accepted nor rejected, and are not counted.
    """
    drafted_by: Counter[int] = Counter()
    reached_by: Counter[int] = Counter()
    accepted_by: Counter[int] = Counter()
    for record in records:
        judged = list(record.drafted)
        if judged and record.committed < sum(record.accepted) + len(judged):
            judged[-1] = record.accepted[-1]  # the last call was cut
        for drafted, accepted in zip(judged, record.accepted, strict=True):
            drafted_by.update(range(1, drafted + 1))
            reached_by.update(range(1, min(drafted, accepted + 1) + 1))
            accepted_by.update(range(1, accepted + 1))
    found = []
    for k, count in sorted(drafted_by.items()):
        conditional = accepted_by[k] / reached_by[k] if reached_by[k] else None
        found.append(Acceptance(k, count, accepted_by[k] / count, conditional))
    return found


def format_estimate(estimate: Estimate | None, unit: str = "×", form: str = ".2f") -> str:
    """A figure with its 95% interval, `1.62× [1.55, 1.70]`."""
    if estimate is None:
        return "n/a"
    value = f"{estimate.value:{form}}{unit}"
    if estimate.lo is None:
        return f"{value} [no interval]"
    return f"{value} [{estimate.lo:{form}}, {estimate.hi:{form}}]"


def format_number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "n/a" if value is None else f"{value:.{digits}f}{unit}"


def value_of(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value
