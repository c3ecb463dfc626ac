"""What one forward pass of the target costs, by requests in a batch, rows of each request and
context.

seconds(batch, rows, context) = short(batch, rows) + batch · slope(rows) · max(0, context − SHORT):
the weights are read once for all requests, each request's keys and values separately. Caches hold
random numbers, on which the time does not depend.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specalign.lm.cache import KVCache
from specalign.lm.model import Target

SHORT = 64
"""The context at which batches are timed."""
REPEATS = 5


@dataclass
class ForwardCosts:
    """short: (batch, rows) → seconds at `SHORT` tokens of context. slope: rows → seconds per
    request and token of context."""

    short: dict[tuple[int, int], float] = field(default_factory=dict)
    slope: dict[int, float] = field(default_factory=dict)

    def at(self, batch: float, rows: float, context: float) -> float:
        """Seconds of a forward pass, linear between what was measured."""
        batches = sorted({b for b, _ in self.short})
        widths = sorted({n for _, n in self.short})
        at_batch = [np.interp(rows, widths, [self.short[b, n] for n in widths]) for b in batches]
        slope = np.interp(rows, widths, [self.slope.get(n, 0.0) for n in widths])
        return float(
            np.interp(batch, batches, at_batch) + batch * slope * max(0.0, context - SHORT)
        )


def measure_forward_costs(
    target: Target, batches: Sequence[int], rows: Sequence[int], long: int
) -> ForwardCosts:
    """Time every batch and number of rows at a short context, and single requests at `long` tokens
    of context."""
    limit = target.context_limit - max(rows)
    short = min(SHORT, max(1, limit))
    long = max(short, min(long, limit))
    costs = ForwardCosts(_time_shapes(target, [(b, n) for b in batches for n in rows], short))
    if long > short:
        for (_, count), seconds in _time_shapes(target, [(1, n) for n in rows], long).items():
            costs.slope[count] = max(0.0, seconds - costs.short[1, count]) / (long - short)
    return costs


def _time_shapes(
    target: Target, shapes: Sequence[tuple[int, int]], context: int
) -> dict[tuple[int, int], float]:
    """Median seconds of each (batch, rows). They take turns, so that a machine that slows down
    slows all of them."""
    room = max(rows for _, rows in shapes)
    caches = [_fill_cache(target, context, room) for _ in range(max(batch for batch, _ in shapes))]
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(REPEATS):
        for batch, rows in shapes:
            _time_forward(
                target, caches[:batch], rows
            )  # brings this shape's data into the processor's caches
            seconds[batch, rows].append(_time_forward(target, caches[:batch], rows))
    return {shape: statistics.median(times) for shape, times in seconds.items()}


def _fill_cache(target: Target, context: int, room: int) -> KVCache:
    """A cache of `context` random tokens with room for more."""
    cache = target.new_cache(1, context + room)
    if target.anatomy.recurrent:
        tokens = torch.zeros(1, context, dtype=torch.int64, device=target.device)
        target.forward(tokens, cache=cache, logits=False)
        return cache
    for slab in cache.slabs:
        slab.keys.normal_()
        slab.values.normal_()
    cache.advance(context)
    return cache


@torch.no_grad()
def _time_forward(target: Target, caches: Sequence[KVCache], rows: int) -> float:
    """Seconds of a forward pass over `rows` tokens after each cache; the caches are rolled back."""
    tokens = torch.randint(0, target.vocab_size, (1, rows), device=target.device)
    lengths = [cache.length for cache in caches]
    start = time.perf_counter()
    if len(caches) == 1:
        target.forward(tokens, cache=caches[0])
    else:
        target.forward_together([tokens] * len(caches), caches, [None] * len(caches))
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    for cache, length in zip(caches, lengths, strict=True):
        cache.length = length
    return seconds
