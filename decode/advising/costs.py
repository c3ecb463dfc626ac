"""What one call of the target costs: requests in a batch, rows of each, context. Measured over caches of random numbers: a call's time
does not depend on what they say.

seconds(batch, rows, context) = short(batch, rows) + batch·slope(rows)·max(0, context − SHORT): the weights are read once for all, each
request's keys and values by itself. A shorter context costs as much as `SHORT`: a slope that was measured in noise must not make it free.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from align.target.cache import KVCache
from align.target.model import Target

SHORT = 64
"""The context at which batches are measured."""
REPEATS = 5


@dataclass
class VerifyCosts:
    """short: (batch, rows) → seconds at `SHORT` tokens of context. slope: rows → seconds that a request's token of context adds."""

    short: dict[tuple[int, int], float] = field(default_factory=dict)
    slope: dict[int, float] = field(default_factory=dict)

    def at(self, batch: float, rows: float, context: float) -> float:
        """Seconds of a call; straight lines between what was measured."""
        batches = sorted({b for b, _ in self.short})
        each = []
        for b in batches:
            widths = sorted(n for one, n in self.short if one == b)
            each.append(float(np.interp(rows, widths, [self.short[b, n] for n in widths])))
        base = float(np.interp(batch, batches, each))
        widths = sorted(self.slope)
        slope = float(np.interp(rows, widths, [self.slope[n] for n in widths])) if widths else 0.0
        return base + batch * slope * max(0.0, context - SHORT)


def verify_costs(target: Target, batches: Sequence[int], rows: Sequence[int], long: int) -> VerifyCosts:
    """Time calls of every batch and number of rows, and single requests at `long` tokens of context, in turn so that a machine that
    changes its pace changes it for all."""
    found, short = VerifyCosts(), min(SHORT, max(1, target.context_limit - max(rows)))
    long = max(short, min(long, target.context_limit - max(rows)))
    shapes = [(b, n, short) for b in batches for n in rows] + [(1, n, long) for n in rows if long > short]
    seconds: dict[tuple[int, int, int], list[float]] = {shape: [] for shape in shapes}
    for context in dict.fromkeys(context for *_, context in shapes):
        own = [shape for shape in shapes if shape[2] == context]
        caches = [_filled(target, context, max(rows)) for _ in range(max(b for b, *_ in own))]
        for turn in range(REPEATS + 1):
            for batch, count, _ in own:
                # after a call of another shape a processor has other things in its caches
                _call(target, caches[:batch], count)
                if turn:  # the first one warms up
                    seconds[batch, count, context].append(_call(target, caches[:batch], count))
    middle = {shape: statistics.median(times) for shape, times in seconds.items()}
    for batch, count, context in shapes:
        if context == short:
            found.short[batch, count] = middle[batch, count, context]
        elif long > short:
            found.slope[count] = max(0.0, (middle[1, count, long] - middle[1, count, short]) / (long - short))
    return found


def pace(target: Target) -> float:
    """Seconds of a short call of one row: how fast the machine is at the moment."""
    cache = _filled(target, min(SHORT, target.context_limit - 1), 1)
    return statistics.median(_call(target, [cache], 1) for _ in range(4 * REPEATS))


def _filled(target: Target, context: int, room: int) -> KVCache:
    """A cache of `context` tokens, random."""
    cache = target.new_cache(1, context + room)
    if target.anatomy.recurrent:
        target.forward(
            torch.zeros(1, context, dtype=torch.int64, device=target.device), cache=cache, logits=False
        )
        return cache
    for slab in cache.slabs:
        slab.keys.normal_()
        slab.values.normal_()
    cache.advance(context)
    return cache


@torch.no_grad()
def _call(target: Target, caches: Sequence[KVCache], rows: int) -> float:
    """Seconds of one call with `rows` tokens after each cache, which stay as they were."""
    tokens = torch.randint(0, target.vocab_size, (1, rows), device=target.device)
    before = [cache.length for cache in caches]
    start = time.perf_counter()
    if len(caches) == 1:
        output = target.forward(tokens, cache=caches[0])
        wanted = output.logits_BLV
    else:
        outputs = target.forward_together([tokens] * len(caches), caches, [None] * len(caches))
        wanted = outputs[-1].logits_BLV
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    assert wanted is not None
    for cache, length in zip(caches, before, strict=True):
        cache.length = length
    return taken
