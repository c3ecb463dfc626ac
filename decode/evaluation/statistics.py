"""Figures from records: paired speed-ups with bootstrap intervals, τ, acceptance per position.
numpy only.

Definitions (c = committed tokens: those after the first one, which the prefill gives):

    time per token of a prompt   mean over repeats of seconds / c; prefill excluded
    speed-up                     mean over prompts of plain decoding's time per token / the method's
    its interval                 percentiles over bootstrap resamples of the prompts, each drawn
                                 with both its times (Efron & Tibshirani 1993, 6, 13.3): 2.5 and
                                 97.5, expanded for few prompts (`_tail`)
    τ, micro                     Σ c / Σ calls; its interval is over the same resamples
    τ, macro                     mean over prompts of the prompt's own Σ c / Σ calls
    acceptance at position k     of the calls that drafted at least k tokens: the share that
                                 accepted the k-th (unconditional), and that share among the calls
                                 that accepted the first k−1 (conditional)

A prompt whose output ended with the prefill's token is left out of times and τ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

from decode.evaluation.records import Record

FEWEST = 5
"""Prompts of a suite below which they do not show its spread."""
RESAMPLES = 10_000
LEVEL = 0.95
"""Of all intervals."""
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
    each. Those whose outputs all ended with the prefill's token are left out."""
    units: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record.method == method:
            units[record.suite, record.group, record.repeat, record.batch].append(record)
    return [unit for unit in units.values() if any(one.committed for one in unit)]


def decode_time(unit: Sequence[Record]) -> float:
    """Seconds per committed token, prefill excluded."""
    return max(one.seconds for one in unit) / sum(one.committed for one in unit)


def whole_time(unit: Sequence[Record]) -> float:
    """Seconds per new token, prefill included."""
    whole = max(one.seconds + one.prefill_seconds for one in unit)
    return whole / sum(one.new_tokens for one in unit)


def times(
    records: Iterable[Record],
    method: str,
    time: Callable[[Sequence[Record]], float] = decode_time,
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
    seed: int,
) -> Estimate | None:
    """A figure with its interval over prompts, resampled within each suite, or all together where a
    suite has fewer than `FEWEST`; None without prompts. `compute`: the sums of the prompts' K
    numbers, (..., K), to the figure, (...)."""
    if not rows:
        return None
    keys = sorted(rows)
    values_NK = np.array([rows[key] for key in keys], dtype=float)
    value = float(compute(values_NK.sum(axis=0)))
    if len(keys) < 2:
        return Estimate(value, None, None, len(keys))
    generator = np.random.default_rng(seed)
    sums_RK = np.zeros((RESAMPLES, values_NK.shape[1]))
    names = np.array([suite for suite, _ in keys])
    if min(Counter(names.tolist()).values()) < FEWEST:
        names[:] = names[0]
    for name in sorted(set(names.tolist())):
        stratum = values_NK[names == name]
        drawn = generator.integers(len(stratum), size=(RESAMPLES, len(stratum)))
        sums_RK += stratum[drawn].sum(axis=1)
    tail = _tail(len(keys))
    lo, hi = np.quantile(compute(sums_RK), [tail, 1 - tail])
    return Estimate(value, float(lo), float(hi), len(keys))


def _tail(count: int) -> float:
    """The share of resamples on each side of an interval over this many prompts: less than
    (1 − LEVEL) / 2, because resamples of few prompts vary too little (Hesterberg 2015, expanded
    percentiles). Student's t by its expansion in 1/ν (Abramowitz & Stegun 26.7.5)."""
    z, df = NormalDist().inv_cdf((1 - LEVEL) / 2), count - 1
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    return NormalDist().cdf(t * sqrt(count / df))


def paired_ratio(
    baseline: Mapping[PromptKey, float], method: Mapping[PromptKey, float], seed: int = 0
) -> Estimate | None:
    """mean(baseline) / mean(method) over the prompts that both have; None when they share none."""
    pairs = {key: (baseline[key], method[key]) for key in baseline.keys() & method.keys()}
    return _estimate(pairs, lambda sums: sums[..., 0] / sums[..., 1], seed)


def tau(counted: Counts, seed: int = 0) -> Estimate | None:
    """Micro τ; None without a call."""
    return _estimate(counted, lambda sums: sums[..., 0] / sums[..., 1], seed)


def tau_macro(counted: Counts) -> float | None:
    """Macro τ; None without a call."""
    if not counted:
        return None
    return float(np.mean([committed / calls for committed, calls in counted.values()]))


def tau_difference(baseline: Counts, method: Counts, seed: int = 0) -> Estimate | None:
    """The method's micro τ minus the baseline's over the prompts that both have; None where they
    share none."""
    return _estimate(
        _pair_counts(baseline, method),
        lambda sums: sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1],
        seed,
    )


def accepted_ratio(baseline: Counts, method: Counts) -> Estimate | None:
    """The method's accepted tokens a call, micro τ − 1, over the baseline's, over the prompts that
    both have; None where they share none, or the baseline has none accepted."""
    both = _pair_counts(baseline, method)
    if not sum(committed - calls for committed, calls, *_ in both.values()):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        found = _estimate(
            both,
            lambda sums: (sums[..., 2] / sums[..., 3] - 1) / (sums[..., 0] / sums[..., 1] - 1),
            seed=0,
        )
    if found is not None and found.hi is not None and not np.isfinite(found.hi):
        return Estimate(found.value, None, None, found.prompts)  # some resample accepted nothing
    return found


def _pair_counts(baseline: Counts, method: Counts) -> dict[PromptKey, tuple[int, int, int, int]]:
    return {key: (*baseline[key], *method[key]) for key in baseline.keys() & method.keys()}


def scores(records: Iterable[Record], method: str) -> dict[PromptKey, float]:
    """(suite, prompt) → the mean score of that method's answers over its repeats."""
    collected: defaultdict[PromptKey, list[float]] = defaultdict(list)
    for record in records:
        if record.method == method and record.score is not None:
            collected[record.suite, record.prompt].append(record.score)
    return {key: float(np.mean(values)) for key, values in collected.items()}


def mean_score(found: Mapping[PromptKey, float], seed: int = 0) -> Estimate | None:
    """The mean score over prompts; None without any."""
    rows = {key: (value, 1.0) for key, value in found.items()}
    return _estimate(rows, lambda sums: sums[..., 0] / sums[..., 1], seed)


def score_difference(
    baseline: Mapping[PromptKey, float], method: Mapping[PromptKey, float], seed: int = 0
) -> Estimate | None:
    """The method's mean score minus the baseline's, over the prompts that both have, in pairs."""
    rows = {key: (method[key] - baseline[key], 1.0) for key in baseline.keys() & method.keys()}
    return _estimate(rows, lambda sums: sums[..., 0] / sums[..., 1], seed)


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
