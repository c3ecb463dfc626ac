"""An n-gram model that counts as a text grows: what a path's next token would be to a reader from left to right.

Interpolated down to the uniform distribution: p(t | h) = (c(h t) + s·p(t | h′)) / (c(h) + s), h′ the context without its
first token (MacKay and Peto, 1995); of single tokens that is add-k smoothing, k = s/V. A sum of 1 at every order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from align.errors import UserError


class NgramModel:
    """Counts of all n-grams up to `order` tokens.

    Args:
        vocab_size: V.
        order: n, the tokens of the longest n-gram.
        strength: s, how many observations the shorter context's distribution is worth.
        base: a model whose counts are added to this one's, and left as they are; of the same vocabulary and order.

    Raises:
        UserError: a number out of its range.
    """

    def __init__(
        self, vocab_size: int, order: int = 3, strength: float = 1.0, base: NgramModel | None = None
    ) -> None:
        if order < 1:
            raise UserError(f"order={order!r}: must be at least 1")
        if not 0 < strength < math.inf:
            raise UserError(f"strength={strength!r}: must be above 0")
        self.vocab_size, self.order, self.strength, self.base = vocab_size, order, strength, base
        self.counts: dict[tuple[int, ...], int] = defaultdict(int)
        """Of n-grams."""
        self.followed: dict[tuple[int, ...], int] = defaultdict(int)
        """Of contexts: how many tokens came after each."""
        self._tail: list[int] = []

    def continued(self) -> NgramModel:
        """A model for one more text, on top of this one's counts."""
        return NgramModel(self.vocab_size, self.order, self.strength, self)

    def read(self, texts: Iterable[Sequence[int]]) -> None:
        """Count texts of their own."""
        for text in texts:
            self._tail = []
            self.extend(text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for first in range(len(self._tail) + 1):
                context = tuple(self._tail[first:])
                self.counts[(*context, token)] += 1
                self.followed[context] += 1
            self._tail.append(token)
            del self._tail[: len(self._tail) - (self.order - 1)]

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """ln p of each of some tokens after a context, of which the last `order` − 1 tokens count."""
        p = [1 / self.vocab_size] * len(tokens)
        for n in range(min(self.order - 1, len(context)) + 1):
            given = tuple(context[len(context) - n :])
            followed = self._followed(given)
            if not followed:  # nor was any longer one
                break
            total = followed + self.strength
            p = [
                (self._count((*given, t)) + self.strength * x) / total for t, x in zip(tokens, p, strict=True)
            ]
        return [math.log(x) for x in p]

    def _count(self, ngram: tuple[int, ...]) -> int:
        return self.counts.get(ngram, 0) + (0 if self.base is None else self.base._count(ngram))

    def _followed(self, context: tuple[int, ...]) -> int:
        return self.followed.get(context, 0) + (0 if self.base is None else self.base._followed(context))
