"""Which setting is fastest at a batch size, context and temperature, and from where on drafting costs more than it gives.

A round of a batch takes one call of the target over all requests' rows, and for each request the drafting and the host's work (less for
further requests than for the first: the drafter's weights are in the processor's caches); it commits τ tokens a request. Plain decoding
is the same with one row and nothing drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decode.advising.costs import VerifyCosts
from decode.advising.observed import PLAIN, Observed, Setting


@dataclass
class Costs:
    """All that was measured. observed: by (setting, temperature), plain decoding's among them. draft_slope: seconds that a token of
    context adds to drafting. pace: seconds of a short call meanwhile."""

    verify: VerifyCosts
    observed: dict[tuple[Setting, float], Observed] = field(default_factory=dict)
    draft_slope: float = 0.0
    pace: float = 1.0

    def temperatures(self, setting: Setting) -> list[float]:
        return sorted(t for s, t in self.observed if s == setting)

    def settings(self) -> list[Setting]:
        """Those that draft."""
        return sorted({s for s, _ in self.observed} - {PLAIN}, key=lambda s: (s.nodes, s.tokens))

    def value(self, setting: Setting, temperature: float, name: str) -> float:
        """tau, draft, host, further or context at a temperature, straight between those that were tried. What drawing costs does not
        depend on how hot it is: times of greedy rounds stand for those alone."""
        heat = self.temperatures(setting)
        if name in ("draft", "host", "further"):
            heat = [t for t in heat if (t > 0) == (temperature > 0)] or heat
        return float(np.interp(temperature, heat, [getattr(self.observed[setting, t], name) for t in heat]))

    def round_seconds(self, setting: Setting, batch: float, context: float, temperature: float) -> float:
        """Seconds of one round of a batch."""
        call = self.verify.at(batch, setting.rows, context)
        seen = self.value(setting, temperature, "context")
        longer = self.draft_slope * max(0.0, context - seen) * (setting != PLAIN)
        alone = self.value(setting, temperature, "draft") + self.value(setting, temperature, "host")
        return call + alone + (batch - 1) * self.value(setting, temperature, "further") + batch * longer

    def speed(self, setting: Setting, batch: float, context: float, temperature: float) -> float:
        """Tokens per second of all requests together."""
        tau = self.value(setting, temperature, "tau")
        return batch * tau / self.round_seconds(setting, batch, context, temperature)

    def speed_up(self, setting: Setting, batch: float, context: float, temperature: float) -> float:
        """Over plain decoding."""
        return self.speed(setting, batch, context, temperature) / self.speed(
            PLAIN, batch, context, temperature
        )


def with_shorter_chains(costs: Costs, longest: Setting, shortest: float = 1.0) -> None:
    """Add the chains shorter than the one that was tried: their acceptance is its beginning, and their drafting costs, straight in
    between, from `shortest` of its cost for one token on: about all of it where a block is drafted in one pass, little where token
    follows token.
    """
    for temperature in costs.temperatures(longest):
        own = costs.observed[longest, temperature]
        for tokens in range(1, longest.tokens):
            shorter, rest = Setting(tokens), (longest.tokens - tokens) / (longest.tokens - 1)
            share = 1 - rest * (1 - shortest)
            tau = own.tau_of(tokens)
            costs.observed.setdefault(
                (shorter, temperature),
                Observed(
                    shorter,
                    temperature,
                    own.reach[:tokens],
                    share * own.draft,
                    own.host,
                    share * own.further,
                    own.context,
                    round(tau * 1000),
                    1000,
                ),
            )


@dataclass(frozen=True)
class Advice:
    """At one context and temperature. best: for a single request. gains: batch → (setting, speed-up) of the fastest. last: the largest
    batch up to which drafting gains, of `most`, the largest that was timed; 0 = none."""

    context: int
    temperature: float
    best: Setting
    gains: dict[int, tuple[Setting, float]]
    last: int

    @property
    def most(self) -> int:
        return max(self.gains)


def advise(
    costs: Costs, contexts: Sequence[int], temperatures: Sequence[float], batches: Sequence[int]
) -> list[Advice]:
    """For every context and temperature."""
    found, most = [], max(batches)
    for context in contexts:
        for temperature in temperatures:
            every = {b: _best(costs, b, context, temperature) for b in range(1, most + 1)}
            last = 0
            while last < most and every[last + 1][1] > 1:
                last += 1
            found.append(Advice(context, temperature, every[1][0], {b: every[b] for b in batches}, last))
    return found


def _best(costs: Costs, batch: int, context: int, temperature: float) -> tuple[Setting, float]:
    tried = [
        (s, costs.speed_up(s, batch, context, temperature))
        for s in costs.settings()
        if applies(costs, s, temperature)
    ]
    return max(tried, key=lambda pair: pair[1])


def applies(costs: Costs, setting: Setting, temperature: float) -> bool:
    """Whether the setting was tried up to this temperature."""
    heat = costs.temperatures(setting)
    return bool(heat) and heat[0] <= temperature <= heat[-1]


def sentence(found: Sequence[Advice]) -> str:
    """What to do, in one: the setting that is fastest for most of those where drafting pays, and up to which batch."""
    lasts, most = [a.last for a in found], found[0].most
    pays = [a.best for a in found if a.last]
    if not pays:
        return "leave drafting off: nowhere here is it faster than plain decoding"
    best = max(pays, key=pays.count)
    if min(lasts) == most:
        off = f"it pays up to batch {most} everywhere that was looked at"
    elif min(lasts) == max(lasts):
        off = f"switch it off above batch {lasts[0]}"
    else:
        off = f"switch it off above batch {min(lasts)} to {max(lasts)}, by context and temperature (the table says which)"
    return f"use {best.words} ({best.options}); {off}"


def contexts_up_to(limit: int) -> list[int]:
    """256 to 8k, as far as the target's context goes."""
    return [c for c in (256, 1024, 2048, 4096, 8192) if c <= limit] or [limit]
