"""Translation between two vocabularies: the drafter's tokens to the target's, and back.

Both tokenizers are treated as codes for bytes. Where they split every text in the same way, tokens
are mapped one by one. Otherwise the bytes are tokenized again (string-level exact match, arXiv
2502.05202): committed tokens never change, and a draft begins exactly where they end. A wrong
translation only costs acceptance, because the target verifies every token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from decode.proposers.base import common_prefix_length
from decode.proposers.byte_tokenizer import ByteTokenizer

CONTEXT = 16
"""Committed tokens used as context: a draft's first token may depend on the word or the run of
spaces before it."""
SYNCHRONISED = 8
"""A text is tokenized again from its middle. When this many tokens are as before, the rest counts
as unchanged."""


class VocabularyMap:
    """Maps drafter tokens to target tokens and back.

    Special tokens are matched by role (EOS, BOS) and by name among special tokens alone: in a draft
    the role decides, so that an end is the target's end, in the drafter's context the name. Text
    that looks like one stays text. A special token of the target's that the drafter lacks is
    written out in the drafter's context, so that the turns of a chat stay apart.

    Args:
        drafter_tokenizer, target_tokenizer: see `ByteTokenizer`.

    Raises:
        UserError: a tokenizer that can't spell a text exactly.
    """

    def __init__(self, drafter_tokenizer: Any, target_tokenizer: Any) -> None:
        self.drafter = ByteTokenizer(drafter_tokenizer, "drafter")
        self.target = ByteTokenizer(target_tokenizer, "target")
        self.same = self.drafter.cut == self.target.cut
        """Both split every text in the same way, so tokens are mapped one by one."""
        # special tokens: in a draft the role decides, so that it ends the target's way; in the
        # context the name
        self._forth = _match_names(self.drafter, self.target) | _match_roles(
            self.drafter, self.target
        )
        self._back = _match_roles(self.target, self.drafter) | _match_names(
            self.target, self.drafter
        )

    def to_target(self, drafter_ids: Sequence[int], before: Sequence[int]) -> list[int]:
        """A draft in the target's tokens, to follow the committed target tokens `before`; perhaps
        none.

        It ends before the first drafted id that stands for neither text nor a special token of the
        target's, and after a special token. Of a text that may go on, half a character at the end
        is left out, and so are last tokens that could still become one longer token with what
        follows. The drafter's last token is exempt: it ended there.
        """
        if self.same:
            return _cut_at_unknown(self._forth.get(token, -1) for token in drafter_ids)
        data, ends = bytearray(), [0]
        special: int | None = None
        for token in drafter_ids:
            piece = self.drafter.piece(token)
            if not piece:
                special = self._forth.get(token)
                break
            data += piece
            ends.append(len(data))
        context = self.target.spell(before[self.target.text_start(before, CONTEXT) :])
        if special is None:
            del data[max(0, len(data) - _count_unfinished(context + data)) :]
        tokens = self._encode_after(context, bytes(data))
        known = _cut_at_unknown(tokens)
        if len(known) < len(tokens):  # the target can't say the rest
            return known
        if special is not None:
            return [*known, special]
        last = len(data) - max((end for end in ends if end < len(data)), default=0)
        return known[: len(known) - self._count_unsettled(known, last)]

    def _encode_after(self, context: bytes, data: bytes) -> list[int]:
        """The target's tokens of `data` after `context`, as it would have cut both together if that
        has a cut between them."""
        tokens, at = self.target.encode(context + data), 0
        for n, token in enumerate(tokens):
            if at == len(context):
                return tokens[n:]
            at += len(self.target.piece(token)) if token >= 0 else 1
        return self.target.encode(data)

    def _count_unsettled(self, tokens: list[int], last: int) -> int:
        """How many tokens at the end together begin a longer token and have more than `last`
        bytes."""
        found, end = 0, b""
        for n, token in enumerate(reversed(tokens), 1):
            end = self.target.piece(token) + end
            if len(end) > self.target.longest:
                break
            if len(end) > last and self.target.continues(end):
                found = n
        return found

    def to_drafter(self, target_ids: Sequence[int], previous: list[int]) -> tuple[int, list[int]]:
        """The drafter's context after more target tokens are committed: how many of its tokens
        stay, and those that follow them. Bytes that the drafter has no token for are left out.

        Args:
            target_ids: the new target tokens, after those that `previous` was made of.
            previous: the drafter's tokens so far; empty at the beginning of a prompt.
        """
        if self.same:
            return len(previous), [d for t in target_ids for d in self._map_token(t)]
        head, runs = self._split_runs(target_ids, first=not previous)
        window = 2 * SYNCHRONISED
        while True:
            start = self.drafter.text_start(previous, window)
            old = previous[start:]
            new = self._encode(self.drafter.spell(old) + head)
            stay = common_prefix_length(old, new)
            if len(old) < window or stay >= SYNCHRONISED:
                break
            window *= 2
        tail = new[stay:]
        for special, text in runs:
            tail += [special, *self._encode(text)]
        return start + stay, tail

    def _map_token(self, token: int) -> list[int]:
        found = self._back.get(token)
        return [found] if found is not None else self._encode(self._bytes_of(token))

    def _encode(self, data: bytes) -> list[int]:
        return [token for token in self.drafter.encode(data) if token >= 0]

    def _bytes_of(self, token: int) -> bytes:
        """A target token as text: a special one is written out."""
        return self.target.piece(token) or self.target.names.get(token, "").encode()

    def _split_runs(
        self, target_ids: Sequence[int], first: bool
    ) -> tuple[bytes, list[tuple[int, bytes]]]:
        """The text before the first special token that the drafter has too, then each of these with
        the text after it.

        The first text of all begins as the drafter's tokenizer begins one: after its BOS, and with
        its space in place of the target's.
        """
        texts, specials = [bytearray()], []
        for token in target_ids:
            special = None if self.target.piece(token) else self._back.get(token)
            if special is None:
                texts[-1] += self._bytes_of(token)
            else:
                specials.append(special)
                texts.append(bytearray())
        if first and (opening := next((text for text in texts if text), None)) is not None:
            opening[:] = self.drafter.prefix + opening.removeprefix(self.target.prefix)
        if first and self.drafter.begins and (texts[0] or specials[:1] != [self.drafter.bos]):
            specials.insert(0, self.drafter.bos)
            texts.insert(0, bytearray())
        return bytes(texts[0]), [(s, bytes(t)) for s, t in zip(specials, texts[1:], strict=True)]


def _match_names(one: ByteTokenizer, other: ByteTokenizer) -> dict[int, int]:
    """Tokens of one tokenizer → those of the other with the same name, among text and special
    tokens apart."""
    text = {
        i: other.ids[name] for name, i in one.ids.items() if one.pieces[i] and name in other.ids
    }
    return text | {
        i: other.specials[name] for name, i in one.specials.items() if name in other.specials
    }


def _match_roles(one: ByteTokenizer, other: ByteTokenizer) -> dict[int, int]:
    """BOS and EOS of one → those of the other; a token that is both counts as EOS."""
    roles = ((one.bos, other.bos), (one.eos, other.eos))
    return {i: match for i, match in roles if i is not None and match is not None}


def _cut_at_unknown(tokens: Iterable[int]) -> list[int]:
    """The tokens before the first -1."""
    return list(takewhile(lambda token: token >= 0, tokens))


def _count_unfinished(data: bytes) -> int:
    """How many bytes at the end are an unfinished character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])
