"""How many tokens a batch drafts in a round, by measurement.

A forward pass over a few rows costs little more than one over a single row; the rows of many
requests cost time. So drafts pay for one request and may not pay for eight. The fastest size is
found by trying: committed tokens per second of rounds with all drafts, with two, one or none.

Only the clock decides, so this is for requests whose text does not depend on the drafts
(`can_pace`).
"""

from dataclasses import dataclass, field

SIZES: tuple[int | None, ...] = (None, 0, 2, 1)
"""Drafted tokens of a request in a round; None = all that its drafter proposes."""
KEEP = 0.9
"""The weight of a round in the next one's average."""
TRY_AGAIN, LATEST, LOSS = 32, 512, 0.005
"""A size that is not the fastest is tried again after `TRY_AGAIN` to `LATEST` rounds, so that it
costs about this share of the time."""


@dataclass
class Trials:
    """Rounds with one number of requests: tokens and seconds by size, recent ones weighing more."""

    sizes: tuple[int | None, ...] = SIZES
    tokens: dict[int | None, float] = field(default_factory=dict)
    seconds: dict[int | None, float] = field(default_factory=dict)
    tried: dict[int | None, int] = field(default_factory=dict)
    rounds: int = 0

    def choose(self) -> int | None:
        self.rounds += 1
        untried = [size for size in self.sizes if size not in self.seconds]
        if untried:
            return untried[0]
        speed = {size: self.tokens[size] / self.seconds[size] for size in self.sizes}
        best = max(speed, key=lambda size: speed[size])
        for size in self.sizes:
            wait = (speed[best] / max(speed[size], 1e-9) - 1) / LOSS
            wait = min(max(TRY_AGAIN, wait), LATEST)
            if size != best and self.rounds - self.tried[size] >= wait:
                return size
        return best

    def observe(self, size: int | None, tokens: int, seconds: float) -> None:
        first = size not in self.tried
        self.tried[size] = self.rounds
        if first:  # a warm-up
            return
        self.tokens[size] = KEEP * self.tokens.get(size, 0.0) + tokens
        self.seconds[size] = KEEP * self.seconds.get(size, 0.0) + seconds


class DraftPace:
    """Measured rounds of a decoder, by the number of requests (powers of two)."""

    def __init__(self, sizes: tuple[int | None, ...] = SIZES) -> None:
        self.sizes = sizes
        self._trials: dict[int, Trials] = {}

    def of(self, requests: int) -> Trials:
        return self._trials.setdefault((requests - 1).bit_length(), Trials(self.sizes))
