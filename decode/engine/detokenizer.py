"""Incremental detokenization without partial characters, cut before a stop string."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

UNFINISHED = "\ufffd"


def special_tokens_in(stops: Sequence[str], tokenizer: Any) -> frozenset[int]:
    """The special tokens that are stop strings."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) if stops else {}
    return frozenset(i for i, token in added.items() if token.special and token.content in stops)


class TextStream:
    """The text of a growing token list. Tokens are added one at a time, so the end of the text does
    not depend on how drafts grouped them.

    Args:
        decode: tokens → text, the tokenizer's.
        stops: strings that end the text; it is cut before the first one that is complete.
        emit: called with every new piece of text that can no longer change.
        special: special tokens, which `decode` leaves out, that end the text too.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        emit: Callable[[str], object] | None = None,
        special: Collection[int] = (),
    ) -> None:
        self.decode, self.stops, self.emit, self.special = decode, tuple(stops), emit, special
        self.text = ""
        self.longest = max(map(len, self.stops), default=0)
        self.tokens: list[int] = []
        # decoding starts here, one settled piece back, because some tokenizers need context
        self.window = 0
        self.settled = 0  # the text holds the tokens before this
        self.sent = 0

    def push(self, token: int) -> bool:
        """Append one token. True when a stop string is complete and the text must not be
        continued."""
        if token in self.special:
            self.text += self._fresh()
            self.settled = len(self.tokens)
            return True
        self.tokens.append(token)
        fresh = self._fresh()
        if self.stops and self._cut(self.text + fresh):
            return True
        if not fresh.endswith(UNFINISHED):
            self.text += fresh
            self.window, self.settled = self.settled, len(self.tokens)
            self._send(len(self.text) - self._maybe_stop())
        return False

    def finish(self) -> str:
        """Emit the text that was held back; returns the whole text."""
        if self.settled < len(self.tokens):
            self.text += self._fresh()
            self.settled = len(self.tokens)
        self._send(len(self.text))
        return self.text

    def _fresh(self) -> str:
        """The text of the tokens after the settled ones."""
        before = self.decode(self.tokens[self.window : self.settled])
        return self.decode(self.tokens[self.window :])[len(before) :]

    def _cut(self, text: str) -> bool:
        start = max(0, len(self.text) - self.longest + 1)
        found = [at for at in (text.find(stop, start) for stop in self.stops) if at >= 0]
        if found:
            self.text = text[: min(found)]
            self.settled = len(self.tokens)
        return bool(found)

    def _maybe_stop(self) -> int:
        """Length of the text's longest ending that a stop string begins with."""
        for length in range(min(self.longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self.stops):
                return length
        return 0

    def _send(self, end: int) -> None:
        if self.emit is not None and end > self.sent:
            piece = self.text[self.sent : end]
            self.sent = end
            self.emit(piece)
