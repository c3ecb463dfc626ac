"""Figures from records: paired speed-ups with bootstrap intervals, τ, acceptance per position.
numpy only.

Definitions (c = committed tokens: those after the first one, which the prefill gives, up to an end
of
    sequence):

    time per token of a prompt   mean over repeats of seconds / c; decoding alone, prefill excluded
    speed-up                     mean over prompts of plain decoding's time per token / mean over the same
    prompts of the method's its interval                 percentiles 2.5 and 97.5 of that ratio over bootstrap
    resamples of the prompts, each prompt drawn with both its times (Efron & Tibshirani 1993, sections 6 and
    13.3) τ, micro                     Σ c / Σ calls, its interval over the same resamples τ, macro
    mean over prompts of the prompt's own Σ c / Σ calls τ against another method's   their difference over the
    prompts that both have, each drawn with both its counts
    acceptance at position k     of the calls that drafted at least k tokens: the share that accepted the k-th
                                 (unconditional), and that share among the calls that accepted the first k−1
                                 (conditional)

A prompt whose output ended with the prefill's token has no decoding to compare and is left out of
times and τ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decode.evaluation.records import Record

FEWEST = 5
"""Prompts of a suite below which they do not show its spread."""
RESAMPLES = 10_000
LEVEL = 0.95
"""Of all intervals."""
_NO_RATIO = 1e12
"""Stands for a resample whose baseline got nothing accepted."""


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval; `lo` and `hi` are None where there are too few prompts for
    one."""

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
) -> Estimate | None:
    """mean(baseline) / mean(method) over the prompts that both have, with its interval.
    Prompts are resampled within each suite; all together where a suite has fewer than `FEWEST`.

    Returns None when they share no prompt. An interval needs two prompts.
    """
    pairs = {key: (baseline[key], method[key]) for key in baseline.keys() & method.keys()}
    return _estimate(pairs, lambda sums: sums[..., 0] / sums[..., 1], seed)


def _estimate(
    rows: Mapping[PromptKey, Sequence[float]],
    of: Callable[[np.ndarray], np.ndarray],
    seed: int,
) -> Estimate | None:
    """A figure with its interval over resampled prompts. `of` computes it from the sums of the
    prompts' K numbers, (..., K) to (...)."""
    if not rows:
        return None
    keys = sorted(rows)
    values_NK = np.array([rows[key] for key in keys], dtype=float)
    value = float(of(values_NK.sum(axis=0)))
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
    lo, hi = np.quantile(of(sums_RK), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(lo), float(hi), len(keys))


def counts(records: Iterable[Record], method: str) -> dict[PromptKey, tuple[int, int]]:
    """(suite, prompt) → that method's committed tokens and target calls, over its repeats; prompts
    without a call left out."""
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
    baseline: Mapping[PromptKey, tuple[int, int]],
    method: Mapping[PromptKey, tuple[int, int]],
    seed: int = 0,
) -> Estimate | None:
    """The method's micro τ less the baseline's over the prompts that both have, with its interval;
    None where they share none."""
    both = {key: (*baseline[key], *method[key]) for key in baseline.keys() & method.keys()}
    return _estimate(
        both, lambda sums: sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1], seed
    )


def accepted_ratio(
    baseline: Mapping[PromptKey, tuple[int, int]], method: Mapping[PromptKey, tuple[int, int]]
) -> Estimate | None:
    """The method's accepted tokens a call, micro τ − 1, over the baseline's, over the prompts that
    both have, with its interval; None where they share none, or the baseline has none accepted."""
    both = {key: (*baseline[key], *method[key]) for key in baseline.keys() & method.keys()}
    if not sum(committed - calls for committed, calls, *_ in both.values()):
        return None

    def ratio(sums: np.ndarray) -> np.ndarray:
        mine, theirs = sums[..., 2] / sums[..., 3] - 1, sums[..., 0] / sums[..., 1] - 1
        return np.divide(mine, theirs, out=np.full_like(mine, _NO_RATIO), where=theirs > 0)

    found = _estimate(both, ratio, 0)
    if found is not None and found.hi is not None and found.hi >= _NO_RATIO / 2:
        return Estimate(found.value, None, None, found.prompts)
    return found


def tau_macro(counted: Mapping[PromptKey, tuple[int, int]]) -> float | None:
    """Macro τ, from `counts`; None without a call."""
    return (
        float(np.mean([committed / calls for committed, calls in counted.values()]))
        if counted
        else None
    )


@dataclass(frozen=True)
class Acceptance:
    """Acceptance at one drafted position, 1 = the first."""

    position: int
    calls: int
    """Calls that drafted at least this many tokens and whose verdict on this one is known."""
    unconditional: float
    conditional: float | None
    """None where no call accepted everything before."""


def acceptance(records: Iterable[Record]) -> list[Acceptance]:
    """Acceptance per position, in order.

    An output cut at an end of sequence or a limit ends inside a call: the drafted tokens after the
    cut were neither accepted nor rejected, and are not counted.
    """
    drafted_by, reached_by, accepted_by = Counter[int](), Counter[int](), Counter[int]()
    for record in records:
        for judged, accepted in _calls(record):
            drafted_by.update(range(1, judged + 1))
            reached_by.update(range(1, min(judged, accepted + 1) + 1))
            accepted_by.update(range(1, accepted + 1))
    return [
        Acceptance(
            k,
            count,
            accepted_by[k] / count,
            accepted_by[k] / reached_by[k] if reached_by[k] else None,
        )
        for k, count in sorted(drafted_by.items())
    ]


def _calls(record: Record) -> list[tuple[int, int]]:
    """(drafted tokens with a verdict, accepted) of each call. A cut call has no verdict on what
    follows its accepted ones: it is the last one, and committed no token of the target's own."""
    rows = list(zip(record.drafted, record.accepted, strict=True))
    committed_in_full = sum(accepted + 1 for accepted in record.accepted)
    if rows and record.committed < committed_in_full:
        rows[-1] = (record.accepted[-1], record.accepted[-1])
    return rows
