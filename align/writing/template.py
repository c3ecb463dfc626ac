"""The chat template around a prompt that the target writes: the tokens before and after it, and its
end.

A template may join the user's text with its own in one token (`USER: Hello` → `:`, ` Hello`), or
change it (trim it). Then text written after the template's start is not what serving feeds, so the
prompt is rendered and tokenized again as a whole.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from align.writing.outline import TargetInfo
from specalign.common.checksums import hash_json
from specalign.common.errors import UserError
from specalign.folder.chat import Chat, chat_ids, draws_at_random, reads_clock, today
from specalign.folder.rendering import SEED, render
from specalign.folder.tokenizer import first_ids, text_ids
from specalign.rows.conversation import Conversation

_MARK = "\u2402PROMPT\u2402"
_TEXTS = ("Hello", "the", "I", "a", "What is 17 times 23?", "1", "(a)", "été", "你好", "`x`")
"""User texts that begin and end in different ways."""
_SPACED_TEXT = " Hello "
_NO_LIMIT = 1 << 62  # as a vocabulary size: a probe may hold tokens that this target lacks


@dataclass(frozen=True)
class Template:
    """The target's chat template around one user text.

    Attributes:
        prefix: tokens before a written prompt.
        turn: tokens between it and its answer; () if the target writes whole texts.
        sha256: of the template's source.
        joined: whether a written prompt is rendered and tokenized again.
        ends: tokens that end a written prompt, besides the end-of-text tokens.
        stop: text that ends one, if no token does.
        date: the ISO date that the template reads, None if it reads none.
        seed: of the template's random draws, None if it draws none.
    """

    prefix: tuple[int, ...]
    turn: tuple[int, ...]
    sha256: str
    joined: bool = False
    ends: frozenset[int] = frozenset()
    stop: str = ""
    date: str | None = None
    seed: int | None = None

    @property
    def bare(self) -> int:
        """Tokens of the template around a text."""
        return len(self.prefix) + len(self.turn)

    @property
    def rendered_sha256(self) -> str | None:
        """Of the tokens, if they depend on the date or on random draws."""
        if self.date is None and self.seed is None:
            return None
        return hash_json([self.prefix, self.turn])


def common_start(lists: Sequence[Sequence[int]]) -> list[int]:
    """The longest list that all of these begin with."""
    start = list[int]()
    for tokens in zip(*lists, strict=False):
        if len({*tokens}) > 1:
            break
        start.append(tokens[0])
    return start


def first_tokens(target: TargetInfo) -> tuple[int, ...]:
    """The tokens in front of a whole text. Raises UserError if the target has none."""
    return first_ids(target.tokenizer, target.eos_ids, target.vocab_size, f"target {target.spec!r}")


def chat_template(target: TargetInfo, date: str | None = None) -> Template:
    """The target's template around one user text; for a base model its first tokens and no turn.
    `date`: ISO date for a template that reads the clock; None = today. Raises UserError: the
    template drops the text, fails, or writes a token that the target lacks."""
    tokenizer = target.tokenizer
    where = f"target {target.spec!r}"
    if not target.has_chat_template:
        if target.chat.system is not None:
            raise UserError(f"data.system: {where} has no chat template to put it into")
        return Template(first_tokens(target), (), hashlib.sha256(b"").hexdigest())
    date = (date or today()) if reads_clock(target) else None
    chat = Chat(target.chat.kwargs, target.chat.system, date)
    marked = chat.apply(Conversation.from_text(_MARK))
    text = render(tokenizer, marked, chat.kwargs, target.spec, date)
    before, found, after = text.partition(_MARK)
    if not found:
        raise UserError(f"{where}: its chat template drops the user's text")
    prefix = text_ids(tokenizer, before, target.vocab_size, where)
    turn = text_ids(tokenizer, after, target.vocab_size, where)
    marks = [token for token in turn if _is_added(tokenizer, token)]
    rendered = {
        text: chat_ids(tokenizer, Conversation.from_text(text), chat, _NO_LIMIT, target.spec)
        for text in (*_TEXTS, _SPACED_TEXT)
    }
    is_apart = all(
        [*prefix, *text_ids(tokenizer, text, _NO_LIMIT, where), *turn] == ids
        for text, ids in rendered.items()
    )
    joined = not is_apart or (bool(turn) and turn[0] not in marks[:1])
    if not is_apart:
        texts = [rendered[text] for text in _TEXTS]
        prefix = common_start(texts)
        turn = common_start([ids[len(prefix) :][::-1] for ids in texts])[::-1]
    return Template(
        tuple(prefix) or first_tokens(target),
        tuple(turn),
        hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        joined=joined,
        ends=frozenset(marks[:1] if joined else turn[:1]),
        stop=after.strip() if joined and not marks else "",
        date=date,
        seed=SEED if draws_at_random(target) else None,
    )


def _is_added(tokenizer: Any, token: int) -> bool:
    """Whether no ordinary text has this token: it was added to the tokenizer, and is not white
    space."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(token)
    return added is not None and bool(added.special or str(added.content).strip())
