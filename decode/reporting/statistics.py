"""Figures from records: paired speed-ups with bootstrap intervals, τ, acceptance per position. numpy only.

Definitions (c = committed tokens, those after the prefill's own first token; nothing after an end of sequence
counts):

    time per token of a prompt   mean over repeats of seconds / c; decoding alone, prefill excluded
    speed-up                     mean over prompts of plain's time per token / mean over the same prompts of
    the method's interval                     percentiles 2.5 and 97.5 of that ratio over bootstrap resamples
                                 of the prompts, each prompt drawn with both its times (Efron & Tibshirani
                                 1993, sections 6 and 13.3)
    τ, micro                     Σ c / Σ calls, its interval over the same resamples; macro: mean over prompts of the prompt's
                                 own Σ c / Σ calls
    τ against another method's   their difference over the prompts that both have, each drawn with both its counts
    acceptance at position k     of the calls that drafted at least k tokens: the share that kept the k-th
                                 (unconditional), and that share among calls that kept the first k−1
                                 (conditional)

A prompt whose output ended with the prefill's token has no decoding to compare and is left out of times and
τ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decode.reporting.records import Record

FEWEST = 5
"""Prompts of a suite below which they do not show its spread."""
RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval; `lo` and `hi` are None where there are too few prompts for one."""

    value: float
    lo: float | None
    hi: float | None
    prompts: int


PromptKey = tuple[str, str]


def decode_time(record: Record) -> float:
    """Seconds per committed token, prefill excluded."""
    return record.seconds / record.committed


def whole_time(record: Record) -> float:
    """Seconds per new token, prefill included."""
    return (record.seconds + record.prefill_seconds) / record.new_tokens


def times(
    records: Iterable[Record], method: str, time: Callable[[Record], float] = decode_time
) -> dict[PromptKey, float]:
    """(suite, prompt) → that method's mean time per token over its repeats."""
    collected: defaultdict[PromptKey, list[float]] = defaultdict(list)
    for record in records:
        if record.method == method and record.committed > 0:
            collected[record.suite, record.prompt].append(time(record))
    return {key: float(np.mean(values)) for key, values in collected.items()}


def paired_ratio(
    baseline: Mapping[PromptKey, float],
    method: Mapping[PromptKey, float],
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> Estimate | None:
    """mean(baseline) / mean(method) over the prompts that both have, with its interval of that level: resampled within each
    suite; over all of them together where a suite has fewer than `FEWEST`.

    Returns None when they share no prompt. An interval needs two prompts.
    """
    pairs = {key: (baseline[key], method[key]) for key in baseline.keys() & method.keys()}
    return _estimate(pairs, lambda sums: sums[..., 0] / sums[..., 1], seed, resamples, level)


def _estimate(
    rows: Mapping[PromptKey, Sequence[float]],
    of: Callable[[np.ndarray], np.ndarray],
    seed: int,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> Estimate | None:
    """`of` the sums over prompts of their K numbers, (..., K) to (...), with its interval over resampled prompts."""
    if not rows:
        return None
    keys = sorted(rows)
    values_NK = np.array([rows[key] for key in keys], dtype=float)
    value = float(of(values_NK.sum(axis=0)))
    if len(keys) < 2:
        return Estimate(value, None, None, len(keys))
    generator = np.random.default_rng(seed)
    sums_RK = np.zeros((resamples, values_NK.shape[1]))
    names = np.array([suite for suite, _ in keys])
    if min(Counter(names.tolist()).values()) < FEWEST:
        names[:] = names[0]
    for name in sorted(set(names.tolist())):
        stratum = values_NK[names == name]
        drawn = generator.integers(len(stratum), size=(resamples, len(stratum)))
        sums_RK += stratum[drawn].sum(axis=1)
    lo, hi = np.quantile(of(sums_RK), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(lo), float(hi), len(keys))


def counts(records: Iterable[Record], method: str) -> dict[PromptKey, tuple[int, int]]:
    """(suite, prompt) → that method's committed tokens and target calls, over its repeats; prompts without a call left out."""
    found: defaultdict[PromptKey, list[int]] = defaultdict(lambda: [0, 0])
    for record in records:
        if record.method == method and record.calls:
            total = found[record.suite, record.prompt]
            total[0] += record.committed
            total[1] += record.calls
    return {key: (committed, calls) for key, (committed, calls) in found.items()}


def tau(counted: Mapping[PromptKey, tuple[int, int]], seed: int = 0) -> Estimate | None:
    """Micro τ with its interval, from `counts`; None without a call."""
    return _estimate(counted, lambda sums: sums[..., 0] / sums[..., 1], seed)


def tau_difference(
    baseline: Mapping[PromptKey, tuple[int, int]], method: Mapping[PromptKey, tuple[int, int]], seed: int = 0
) -> Estimate | None:
    """The method's micro τ less the baseline's over the prompts that both have, with its interval; None where they share none."""
    both = {key: (*baseline[key], *method[key]) for key in baseline.keys() & method.keys()}
    return _estimate(both, lambda sums: sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1], seed)


def tau_micro(records: Sequence[Record]) -> float | None:
    """Σ committed / Σ calls; None without a call."""
    calls = sum(record.calls for record in records)
    return sum(record.committed for record in records) / calls if calls else None


def tau_macro(records: Sequence[Record]) -> float | None:
    """Mean over prompts of the prompt's own micro τ."""
    groups: defaultdict[PromptKey, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.suite, record.prompt].append(record)
    values = [tau for group in groups.values() if (tau := tau_micro(group)) is not None]
    return float(np.mean(values)) if values else None


@dataclass(frozen=True)
class Acceptance:
    """Acceptance at one drafted position, 1 = the first."""

    position: int
    calls: int
    """Calls whose draft reached this far and whose verdict on it is known."""
    unconditional: float
    conditional: float | None
    """None where no call kept everything before."""


def acceptance(records: Iterable[Record]) -> list[Acceptance]:
    """Acceptance per position, in order.

    An output cut at an end of sequence or a limit ends inside a call: the drafted tokens after the cut were
    neither kept nor refused, and are not counted.
    """
    drafted_by: defaultdict[int, int] = defaultdict(int)
    reached_by: defaultdict[int, int] = defaultdict(int)
    kept_by: defaultdict[int, int] = defaultdict(int)
    for record in records:
        for drafted, accepted, cut in _calls(record):
            for position in range(1, (accepted if cut else drafted) + 1):
                drafted_by[position] += 1
                reached_by[position] += accepted >= position - 1
                kept_by[position] += accepted >= position
    return [
        Acceptance(
            position, count, kept_by[position] / count,
            kept_by[position] / reached_by[position] if reached_by[position] else None,
        )
        for position, count in sorted(drafted_by.items())
    ]  # fmt: skip


def _calls(record: Record) -> list[tuple[int, int, bool]]:
    """(drafted, accepted, cut) of each call. The last was cut when it committed no token of the target's
    own."""
    rows = [(d, a, False) for d, a in zip(record.drafted, record.accepted, strict=True)]
    if rows:
        before = sum(accepted + 1 for _, accepted, _ in rows[:-1])
        drafted, accepted, _ = rows[-1]
        rows[-1] = (drafted, accepted, record.committed - before <= accepted)
    return rows
