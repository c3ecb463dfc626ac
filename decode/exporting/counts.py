"""How many drafts were accepted: of outputs decoded here, or as a server's metrics say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """Of speculative decoding since a server started: calls, drafted and accepted tokens, accepted ones by position."""

    calls: float = 0
    drafted: float = 0
    accepted: float = 0
    at_position: tuple[float, ...] = ()

    @classmethod
    def of(cls, accepted: Sequence[Sequence[int]], drafts: int) -> Counts:
        """Of outputs: accepted tokens of each call of each; `drafts`: K, positions."""
        calls = [a for one in accepted for a in one]
        at = tuple(float(sum(a > k for a in calls)) for k in range(drafts))
        return cls(len(calls), len(calls) * drafts, sum(calls), at)

    def since(self, before: Counts) -> Counts:
        """What came after `before`."""
        earlier = [*before.at_position, *[0.0] * (len(self.at_position) - len(before.at_position))]
        return Counts(
            self.calls - before.calls,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(a - b for a, b in zip(self.at_position, earlier, strict=True)),
        )

    @property
    def tau(self) -> float:
        """Tokens per call."""
        return 1 + self.accepted / self.calls if self.calls else 1.0

    @property
    def line(self) -> str:
        """For people."""
        positions = " ".join(f"{a:.0f}" for a in self.at_position)
        return f"{self.calls:.0f} calls, τ {self.tau:.3f}, accepted at each position {positions}"
