"""The text of tokens while they are generated, without half characters, and cut before a stop
string."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

UNFINISHED = "\ufffd"
_LAST_MARK = 0x10FFFD
"""Code points from here down, of private use, stand for special tokens."""


def special_tokens_in(stops: Sequence[str], tokenizer: Any) -> dict[int, str]:
    """The special tokens that occur in stop strings: their ids and texts."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) if stops else {}
    special = {
        index: token.content for index, token in added.items() if token.special and token.content
    }
    return {index: text for index, text in special.items() if any(text in stop for stop in stops)}


class TextStream:
    """Text of a growing token list.

    Args:
        decode: tokens → text, the tokenizer's.
        stops: strings that end the text; it is cut before the first one that is complete.
        emit: called with every new piece of text that can no longer change; together the pieces are
            the text that `finish` returns.
        special: special tokens that occur in stop strings, which `decode` leaves out: id → text.

    Tokens are added one by one, so that the end of the text does not depend on how drafts grouped
    them.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        emit: Callable[[str], object] | None = None,
        special: Mapping[int, str] | None = None,
    ) -> None:
        self.decode_text = decode
        self.emit = emit
        self.marks = {index: chr(_LAST_MARK - i) for i, index in enumerate(special or {})}
        """In `text` and in stop strings a character stands for each special token, so that its
        spelt-out text differs."""
        self.unmark = {ord(mark): None for mark in self.marks.values()}
        self.stops = tuple(
            dict.fromkeys([*stops, *(self._marked(stop, special or {}) for stop in stops)])
        )
        self.text = ""
        self.longest = max(map(len, self.stops), default=0)
        self.tokens: list[int] = []
        self.window = (
            0  # decoding starts here, one settled piece back, because some tokenizers need context
        )
        self.settled = 0  # the text holds the tokens before this
        self.sent = 0

    def _marked(self, stop: str, special: Mapping[int, str]) -> str:
        for index, text in sorted(special.items(), key=lambda item: -len(item[1])):
            stop = stop.replace(text, self.marks[index])
        return stop

    def decode(self, tokens: list[int]) -> str:
        """Tokens → text, with the marks of special tokens."""
        text = self.decode_text(tokens)
        for place in reversed([i for i, token in enumerate(tokens) if token in self.marks]):
            start = len(self.decode_text(tokens[:place]))
            text = text[:start] + self.marks[tokens[place]] + text[start:]
        return text

    def push(self, token: int) -> bool:
        """Append one token. True when a stop string is complete: the text is cut before it and must
        not be continued."""
        self.tokens.append(token)
        before = self.decode(self.tokens[self.window : self.settled])
        fresh = self.decode(self.tokens[self.window :])[len(before) :]
        if self.stops and self._cut(self.text + fresh):
            return True
        if not fresh.endswith(UNFINISHED):
            self.text += fresh
            self.window, self.settled = self.settled, len(self.tokens)
            self._send(len(self.text) - self._maybe_stop())
        return False

    def finish(self) -> str:
        """Call after the last token: emits the text that was held back and returns the whole
        text."""
        if self.settled < len(self.tokens):
            before = self.decode(self.tokens[self.window : self.settled])
            self.text += self.decode(self.tokens[self.window :])[len(before) :]
            self.settled = len(self.tokens)
        self._send(len(self.text))
        return self.text.translate(self.unmark)

    def _cut(self, text: str) -> bool:
        start = max(0, len(self.text) - self.longest + 1)
        found = [at for at in (text.find(stop, start) for stop in self.stops) if at >= 0]
        if found:
            self.text = text[: min(found)]
            self.settled = len(self.tokens)
        return bool(found)

    def _maybe_stop(self) -> int:
        """Length of the text's longest ending that a stop string begins with."""
        lengths = range(min(self.longest - 1, len(self.text)), 0, -1)
        return next(
            (n for n in lengths if any(s.startswith(self.text[-n:]) for s in self.stops)), 0
        )

    def _send(self, end: int) -> None:
        if self.emit is not None and end > self.sent:
            piece = self.text[self.sent : end].translate(self.unmark)
            self.sent = end
            if piece:
                self.emit(piece)
