"""How many tokens requests draft in a round, by measurement.

A forward pass over a few rows costs little more than one over a single row; the rows of many
requests cost time. So drafts pay for one request and may not pay for eight. The fastest size is
found by trying: committed tokens per second of rounds with all drafts, with two, one or none.
A single request drafts all or, where that is slower than plain decoding, nothing.

A size is chosen before its tokens are drawn, so outputs follow the target's distribution. The clock
decides, so a seed keeps its text only where that does not depend on the drafts
(`RequestRunner.adapts`).
"""

from collections import Counter
from dataclasses import dataclass, field

SIZES: tuple[int | None, ...] = (None, 0, 2, 1)
"""Drafted tokens of a request in a round; None = all that its drafter proposes."""
KEEP = 0.9
"""The weight of a round in the next one's average."""
KEEP_ALONE, FIRST_ALONE, MARGIN_ALONE = 0.98, 8, 0.02
"""Of a single request: its rounds' tokens vary more, and what it drafts may pay off in parts of a
text only. So averages are longer, the first rounds draft, and plain rounds must be faster by this
share."""
TRY_AGAIN, LATEST, LOSS = 32, 512, 0.0025
"""A size that is not the fastest is tried again after `TRY_AGAIN` to `LATEST` rounds, so that it
costs about this share of the time."""


@dataclass
class Trials:
    """Rounds with one number of requests: tokens and seconds by size, recent ones weighing more;
    and how often each size ran. What never ran has the estimate of another number of requests,
    scaled by the first round, and is soon tried; a first round may compile or allocate, so it is
    soon repeated.

    keep: the weight of a round in the next one's average. first: rounds with all drafts before
    other sizes are tried. margin: how much faster they must be, as a share.
    """

    sizes: tuple[int | None, ...] = SIZES
    keep: float = KEEP
    first: int = 0
    margin: float = 0.0
    tokens: dict[int | None, float] = field(default_factory=dict)
    seconds: dict[int | None, float] = field(default_factory=dict)
    tried: dict[int | None, int] = field(default_factory=dict)
    counts: Counter[int | None] = field(default_factory=Counter)
    rounds: int = 0

    def choose(self) -> int | None:
        self.rounds += 1
        if self.counts[None] < self.first:
            return None
        untried = [size for size in self.sizes if size not in self.seconds]
        if untried:
            return untried[0]
        speed = {size: self.tokens[size] / self.seconds[size] for size in self.sizes}
        speed[None] *= 1 + self.margin
        best = max(speed, key=lambda size: speed[size])
        for size in self.sizes:
            wait = (speed[best] / max(speed[size], 1e-9) - 1) / LOSS
            once = self.counts[size] < 2
            wait = TRY_AGAIN if once else max(TRY_AGAIN, min(wait, LATEST))
            if size != best and self.rounds - self.tried.get(size, 0) >= wait:
                return size
        return best

    def observe(self, size: int | None, tokens: float, seconds: float) -> None:
        self.tried[size] = self.rounds
        self.counts[size] += 1
        if self.counts.total() == 1 and self.seconds:  # estimates of another number of requests
            scale = tokens / seconds / (self.tokens[size] / self.seconds[size])
            self.tokens = {other: scale * count for other, count in self.tokens.items()}
        keep = self.keep if self.counts[size] > 2 else 0.0
        self.tokens[size] = keep * self.tokens.get(size, 0.0) + tokens
        self.seconds[size] = keep * self.seconds.get(size, 0.0) + seconds


class DraftPace:
    """Measured rounds of a decoder, by the number of requests (powers of two)."""

    def __init__(self, sizes: tuple[int | None, ...] = SIZES) -> None:
        self.sizes = sizes
        self._trials: dict[int, Trials] = {}

    def of(self, requests: int) -> Trials:
        """The rounds of this number of requests; at first with estimates of the nearest one."""
        power = (requests - 1).bit_length()
        if power not in self._trials:
            self._trials[power] = self._begin(power)
        return self._trials[power]

    def _begin(self, power: int) -> Trials:
        if not power:
            return Trials((None, 0), KEEP_ALONE, FIRST_ALONE, MARGIN_ALONE)
        own, count = Trials(self.sizes), len(self.sizes)
        known = [n for n, one in self._trials.items() if n and len(one.seconds) == count]
        if known:
            near = self._trials[min(known, key=lambda other: abs(other - power))]
            own.tokens, own.seconds = dict(near.tokens), dict(near.seconds)
        return own
