"""What surrounds a prompt that the target writes itself: the tokens before it, those after it, and how its end is told.

A chat template may join the user's text to its own in one token (`USER: Hello` → `:`, ` Hello`), or change it (trim it). Then a text
that was written behind the template's start is not what serving feeds: it is rendered and tokenised again as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from align.common.errors import UserError
from align.folder.chat import Chat, chat_ids
from align.folder.clock import reads_clock, today
from align.folder.rendering import TemplateRefusal, render
from align.folder.tokenizer import first_ids, text_ids
from align.rows.conversation import Conversation
from align.writing.generation import common_start

_MARK = "\u2402PROMPT\u2402"
_TEXTS = ("Hello", "the", "I", "a", "What is 17 times 23?", "1", "(a)", "été", "你好", "`x`")
"""User texts that begin and end in different ways."""
_EDGES = " Hello "
_ANY = 1 << 62
"""More tokens than any target has: a tried text may hold some that this one lacks."""


class Told(Protocol):
    """What is asked of a target before its weights are: a `Target` has it, and so has an `Outline`."""

    spec: str
    tokenizer: Any
    chat: Chat
    eos_ids: tuple[int, ...]
    vocab_size: int
    context_limit: int

    @property
    def has_chat_template(self) -> bool: ...
    @property
    def hash(self) -> str | None: ...


@dataclass(frozen=True)
class Template:
    """The target's chat template around one user text.

    prefix: tokens before a written prompt.
    turn: tokens between it and its answer; () where the target writes whole texts.
    sha256: of the template's source.
    joined: whether a written prompt is rendered and tokenised again with what surrounds it.
    ends: tokens that end a written prompt, beside those that end a text.
    stop: text that ends one, where no token does.
    date: the day on which its clock stands, ISO; None where it reads none.
    """

    prefix: tuple[int, ...]
    turn: tuple[int, ...]
    sha256: str
    joined: bool = False
    ends: frozenset[int] = frozenset()
    stop: str = ""
    date: str | None = None

    @property
    def bare(self) -> int:
        """Tokens of the template around a text."""
        return len(self.prefix) + len(self.turn)

    @property
    def rendered_sha256(self) -> str | None:
        """Of what it writes, where that depends on the date."""
        if self.date is None:
            return None
        return hashlib.sha256(json.dumps([self.prefix, self.turn]).encode()).hexdigest()


def first_tokens(target: Told) -> tuple[int, ...]:
    """The tokens in front of a whole text (`first_ids`). Raises UserError where the target has none."""
    return first_ids(target.tokenizer, target.eos_ids, target.vocab_size, f"target {target.spec!r}")


def chat_template(target: Told, date: str | None = None) -> Template:
    """The target's own template around one user text; for a base model the beginning-of-text token and no turn.

    Args:
        date: of the clock of a template that reads it, ISO; None = today.

    Raises:
        UserError: the template leaves the text out, fails, or writes a token that the target does not have.
    """
    tokenizer = target.tokenizer
    if not target.has_chat_template:
        if target.chat.system is not None:
            raise UserError(f"data.system: target {target.spec!r} has no chat template to put it into")
        return Template(first_tokens(target), (), hashlib.sha256(b"").hexdigest())
    date = (date or today()) if reads_clock(target) else None
    chat = Chat(target.chat.kwargs, target.chat.system, date)
    try:
        text = render(tokenizer, chat.apply(Conversation.from_text(_MARK)), chat.kwargs, target.spec, date)
    except TemplateRefusal as refusal:
        raise UserError(
            f"target {target.spec!r}: its chat template refuses a user's text: {refusal.reason}"
        ) from None
    before, found, after = text.partition(_MARK)
    if not found:
        raise UserError(f"target {target.spec!r}: its chat template does not keep the user's text")
    where, given = f"target {target.spec!r}", target.chat.system or ""
    prefix, turn = (text_ids(tokenizer, part, target.vocab_size, where, given) for part in (before, after))
    digest = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    ends = [token for token in turn if _is_mark(tokenizer, token)]
    whole = {text: _whole(target, chat, text) for text in (*_TEXTS, _EDGES)}
    apart = all(
        [*prefix, *text_ids(tokenizer, text, _ANY, where), *turn] == ids for text, ids in whole.items()
    )
    if apart and (not turn or turn[0] in ends[:1]):
        start = tuple(prefix) or first_tokens(target)
        return Template(start, tuple(turn), digest, ends=frozenset(turn[:1]), date=date)
    if not apart:
        prefix, turn = _surroundings([whole[text] for text in _TEXTS])
    return Template(
        tuple(prefix) or first_tokens(target),
        tuple(turn),
        digest,
        joined=True,
        ends=frozenset(ends[:1]),
        stop="" if ends else after.strip(),
        date=date,
    )


def _whole(target: Told, chat: Chat, text: str) -> list[int]:
    return chat_ids(target.tokenizer, Conversation.from_text(text), chat, _ANY, target.spec)


def _is_mark(tokenizer: Any, token: int) -> bool:
    """Whether a token is one that no ordinary text has: added to the tokenizer, and more than white space."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(token)
    return added is not None and bool(added.special or str(added.content).strip())


def _surroundings(wholes: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The tokens that all begin with, and those that all end with."""
    prefix = common_start(wholes)
    rest = [ids[len(prefix) :][::-1] for ids in wholes]
    return prefix, common_start(rest)[::-1]
