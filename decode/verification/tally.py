"""What a check compared, and what it found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

TITLES = {
    "rows": "The distribution that verification received is that of a fresh, cache-less forward pass, processed by transformers",
    "proposals": "Drafts are distributed as the q that is reported with them",
    "rule": "The verifier turns any p and q into exactly p",
    "randomness": "Every random number comes from the request's own generator and is used once",
    "commit": "The text is prompt, accepted path and next token of each round, and ends where it must",
    "end_to_end": "Greedy text equals plain decoding's and transformers' generate",
}
"""The six checks, in their order."""


@dataclass
class Finding:
    """A difference that rounding does not explain. `place`: what replays it."""

    check: str
    what: str
    place: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tally:
    """One check's figures.

    Args:
        counts: what was compared, and how often.
        largest, bounds: by name, the difference that comes nearest to its bound, and that bound.
    """

    check: str
    counts: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def measure(self, name: str, value: float, bound: float) -> bool:
        """Record a difference. Returns whether rounding explains it."""
        if name not in self.largest or not value * self.bounds[name] <= self.largest[name] * bound:
            self.largest[name], self.bounds[name] = value, bound
        self.counts[name] += 1
        return value <= bound

    def find(self, what: str, **place: Any) -> None:
        """Record a difference that rounding does not explain."""
        self.findings.append(Finding(self.check, what, place))
