"""Near-duplicates among token sequences, by the share of token 3-grams that they have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence


class NearDuplicates:
    """Remembers sequences; says of a new one whether it is near to one seen before.

    Near means a Jaccard similarity of their sets of 3-grams of at least `threshold` (exact, through an inverted
    index; no hashing error). A threshold above 1 switches the check off.
    """

    def __init__(self, threshold: float, width: int = 3) -> None:
        self.threshold, self.width = threshold, width
        self._sizes: list[int] = []
        self._where: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def _grams(self, tokens: Sequence[int]) -> set[tuple[int, ...]]:
        if len(tokens) < self.width:
            return {tuple(tokens)}
        return {tuple(tokens[i : i + self.width]) for i in range(len(tokens) - self.width + 1)}

    def add(self, tokens: Sequence[int]) -> bool:
        """Remember `tokens` unless they are near to a remembered sequence; True when they were new."""
        grams = self._grams(tokens)
        shared: Counter[int] = Counter()
        for gram in grams:
            shared.update(self._where.get(gram, ()))
        for index, count in shared.items():
            if count / (len(grams) + self._sizes[index] - count) >= self.threshold:
                return False
        for gram in grams:
            self._where[gram].append(len(self._sizes))
        self._sizes.append(len(grams))
        return True
