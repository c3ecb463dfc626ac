"""Which draft size is fastest at a batch size, context and temperature, and where drafting stops
paying.

A round of a batch takes one forward pass over all requests' rows and, for each request, drafting
and the host's work. It commits τ tokens per request. Plain decoding is the same with one row and
nothing drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decode.advising.costs import ForwardCosts
from decode.advising.observation import PLAIN, DraftSize, Observation


@dataclass
class DecodingCosts:
    """Everything measured. observed: by (draft size, temperature), plain decoding included.
    draft_slope: seconds that a token of context adds to drafting."""

    forward: ForwardCosts
    observed: dict[tuple[DraftSize, float], Observation] = field(default_factory=dict)
    draft_slope: float = 0.0

    def temperatures(self, size: DraftSize) -> list[float]:
        return sorted(t for s, t in self.observed if s == size)

    def sizes_at(self, temperature: float) -> list[DraftSize]:
        """The draft sizes observed on both sides of this temperature."""
        sizes = {size for size, _ in self.observed} - {PLAIN}
        ranges = {size: self.temperatures(size) for size in sizes}
        found = [size for size in sizes if ranges[size][0] <= temperature <= ranges[size][-1]]
        return sorted(found, key=lambda size: (size.nodes, size.tokens))

    def interpolate(self, size: DraftSize, temperature: float, name: str) -> float:
        """A field of the observations at a temperature between those measured. Times of greedy
        rounds count at temperature 0 only."""
        known = self.temperatures(size)
        if name in ("draft", "overhead", "further"):
            known = [t for t in known if (t > 0) == (temperature > 0)] or known
        return float(
            np.interp(temperature, known, [getattr(self.observed[size, t], name) for t in known])
        )

    def round_seconds(
        self, size: DraftSize, batch: int, context: float, temperature: float
    ) -> float:
        overhead = self.interpolate(size, temperature, "overhead")
        further = self.interpolate(size, temperature, "further")
        longer = max(0.0, context - self.interpolate(size, temperature, "context"))
        drafting = 0.0 if size == PLAIN else self.draft_slope * longer
        forward = self.forward.at(batch, size.rows, context)
        return forward + overhead + (batch - 1) * further + batch * drafting

    def speed(self, size: DraftSize, batch: int, context: float, temperature: float) -> float:
        """Tokens per second of all requests together."""
        tau = self.interpolate(size, temperature, "tau")
        return batch * tau / self.round_seconds(size, batch, context, temperature)


@dataclass(frozen=True)
class Advice:
    """At one context and temperature. gains: batch → (fastest draft size, its speed over plain
    decoding), for every batch from 1 up. pays_up_to: the largest batch up to which drafting gains;
    0 = none."""

    context: int
    temperature: float
    gains: dict[int, tuple[DraftSize, float]]

    @property
    def pays_up_to(self) -> int:
        losing = [batch for batch, (_, gain) in self.gains.items() if gain <= 1]
        return min(losing) - 1 if losing else max(self.gains)


def advise(
    costs: DecodingCosts, contexts: Sequence[int], temperatures: Sequence[float], batch: int
) -> list[Advice]:
    """For every context and temperature, at all batches up to `batch`."""
    return [
        Advice(
            context,
            temperature,
            {b: _find_best(costs, b, context, temperature) for b in range(1, batch + 1)},
        )
        for context in contexts
        for temperature in temperatures
    ]


def _find_best(
    costs: DecodingCosts, batch: int, context: int, temperature: float
) -> tuple[DraftSize, float]:
    plain = costs.speed(PLAIN, batch, context, temperature)
    sizes = costs.sizes_at(temperature)
    gains = [(size, costs.speed(size, batch, context, temperature) / plain) for size in sizes]
    return max(gains, key=lambda pair: pair[1])


def summarize(advice: Sequence[Advice]) -> str:
    """One sentence: the draft size that is fastest most often where drafting pays, and up to which
    batch."""
    limits = [a.pays_up_to for a in advice]
    largest = max(advice[0].gains)
    best = [a.gains[1][0] for a in advice if a.pays_up_to]
    if not best:
        return "leave drafting off: it is nowhere faster than plain decoding"
    size = max(best, key=best.count)
    if min(limits) == largest:
        off = f"it pays up to batch {largest} everywhere that was measured"
    elif min(limits) == max(limits):
        off = f"switch it off above batch {limits[0]}"
    else:
        off = f"switch it off above batch {min(limits)} to {max(limits)}, depending on context and temperature (see the table)"
    return f"use {size.label} ({size.options}); {off}"


def list_contexts(limit: int) -> list[int]:
    """256 to 8k tokens, up to the target's context."""
    return [c for c in (256, 1024, 2048, 4096, 8192) if c <= limit] or [limit]
