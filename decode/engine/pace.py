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
FADE, SLOWEST = 0.5, 1.5
"""Earlier rounds lose weight with every round since, but one round makes them lose no more than
this; and it counts as this many average ones at most: something else may have delayed it."""
KEEP_ALONE, FIRST_ALONE, MARGIN_ALONE = 0.98, 8, 0.02
"""Of a single request: its rounds' tokens vary more, and what it drafts may pay off in parts of a
text only. So averages are longer, the first rounds draft, and plain rounds must be faster by this
share."""
UNEVEN = 0.15
"""Where none waits for its place, the slowest request decides, and drafts help some more than
others. So rounds with drafts must commit this share more in the same time."""
TRY_AGAIN, LOSS, SOONER = 32, 0.0025, 8
"""A size that is not the fastest is tried again after at least `TRY_AGAIN` rounds, so that it
costs about this share of the time; `SOONER` times as early where its estimate is of other rounds."""


@dataclass
class Trials:
    """Rounds with one number of requests: tokens, seconds and weight by size, recent ones weighing
    more; and how often each size ran. What never ran has the estimate of another number of requests
    or length, scaled by the first round, and is tried sooner; a first round may compile or
    allocate, so it is soon repeated.

    keep: the weight of a round in the next one's average. first: rounds with all drafts before
    other sizes are tried. margin: how much faster they must be, as a share.
    """

    sizes: tuple[int | None, ...] = SIZES
    keep: float = KEEP
    first: int = 0
    margin: float = 0.0
    tokens: dict[int | None, float] = field(default_factory=dict)
    seconds: dict[int | None, float] = field(default_factory=dict)
    weights: dict[int | None, float] = field(default_factory=dict)
    tried: Counter[int | None] = field(default_factory=Counter)
    counts: Counter[int | None] = field(default_factory=Counter)
    rounds: int = 0

    def choose(self, draining: bool = False) -> int | None:
        """The size of the next round. draining: there are several requests, and none waits."""
        self.rounds += 1
        if self.counts[None] < self.first:
            return None
        untried = [size for size in self.sizes if size not in self.seconds]
        if untried:
            return untried[0]
        speed = {size: self.tokens[size] / self.seconds[size] for size in self.sizes}
        speed[None] *= 1 + self.margin
        speed[0] *= 1 + UNEVEN * draining
        best = max(speed, key=lambda size: speed[size])
        for size in self.sizes:
            wait = (speed[best] / speed[size] - 1) / LOSS
            if self.counts[size] < 2:  # an estimate of other rounds; or a first round
                wait = 0 if self.counts[size] else wait / SOONER
            if size != best and self.rounds - self.tried[size] >= max(TRY_AGAIN, wait):
                return size
        return best

    def observe(self, size: int | None, tokens: float, seconds: float) -> None:
        """Count a round that committed tokens."""
        since = self.rounds - self.tried[size]
        self.tried[size] = self.rounds
        self.counts[size] += 1
        if self.counts.total() == 1 and self.seconds:  # estimates of another number of requests
            scale = tokens / seconds / (self.tokens[size] / self.seconds[size])
            self.tokens = {other: scale * count for other, count in self.tokens.items()}
        keep = 0.0
        if self.counts[size] > 2:
            seconds = min(seconds, SLOWEST * self.seconds[size] / self.weights[size])
            keep = min(self.keep, max(self.keep**since, FADE))
        self.weights[size] = keep * self.weights.get(size, 0.0) + 1
        self.tokens[size] = keep * self.tokens.get(size, 0.0) + tokens
        self.seconds[size] = keep * self.seconds.get(size, 0.0) + seconds


class DraftPace:
    """Measured rounds of a decoder, by the number of requests (powers of two) and the length of the
    longest text (powers of four)."""

    def __init__(self, sizes: tuple[int | None, ...] = SIZES) -> None:
        self.sizes = sizes
        self._trials: dict[tuple[int, int], Trials] = {}

    def of(self, requests: int, length: int) -> Trials:
        """The rounds of this number of requests; at first with estimates of the nearest ones."""
        key = (requests - 1).bit_length(), (length >> 7).bit_length() // 2
        if key not in self._trials:
            self._trials[key] = self._begin(*key)
        return self._trials[key]

    def _begin(self, power: int, length: int) -> Trials:
        alone = Trials((None, 0), KEEP_ALONE, FIRST_ALONE, MARGIN_ALONE)
        own = Trials(self.sizes) if power else alone
        known = [
            (abs(other - power), abs(longest - length), one)
            for (other, longest), one in [*self._trials.items()]
            if bool(other) is bool(power) and len(one.seconds) == len(own.sizes)
        ]
        if known:
            near = min(known, key=lambda one: one[:2])[2]
            own.tokens, own.seconds, own.first = dict(near.tokens), dict(near.seconds), 0
        return own
