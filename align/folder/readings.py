"""What a chat template reads beside a conversation: the clock, random numbers. Each is named in a note."""

from __future__ import annotations

import datetime
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from align.common.errors import UserError
from align.common.text import say_once
from align.folder.chat import TOOL, Chat, variables
from align.folder.clock import draws_at_random, reads_clock
from align.folder.rendering import TEMPLATE, render
from align.rows.conversation import Conversation


class Templated(Protocol):
    """A target, with its weights or without."""

    spec: str
    tokenizer: Any
    chat: Chat

    @property
    def has_chat_template(self) -> bool: ...


@dataclass(frozen=True)
class Readings:
    """clock, random: whether the text depends on them. switch: the template's variable that sets the date, where it has one."""

    clock: bool = False
    random: bool = False
    switch: str | None = None


def readings(target: Templated) -> Readings:
    """What the target's template reads, told by rendering a text alone, with a system prompt and with tools."""
    if not target.has_chat_template:
        return Readings()
    key = str(target.tokenizer.chat_template), repr(target.chat.kwargs), target.chat.system
    if key not in _known:
        _known[key] = _look(target)
    return _known[key]


_known: dict[tuple[str, str, str | None], Readings] = {}


def _look(target: Templated) -> Readings:
    clock = any(reads_clock(write) for write in _writers(target, target.chat))
    drawn = any(draws_at_random(write) for write in _writers(target, target.chat))
    return Readings(clock, drawn, _switch(target) if clock else None)


def _writers(target: Templated, chat: Chat) -> list[Any]:
    """What renders each of the tried conversations that the template takes."""
    text = Conversation.from_text("Hello")
    system = replace(text, messages=({"role": "system", "content": "Be brief."}, *text.messages))
    found = []
    for talk in (chat.apply(text), system, replace(chat.apply(text), tools=(TOOL,))):

        def write(seed: int = 0, talk: Conversation = talk) -> str:
            return render(target.tokenizer, talk, chat.kwargs, target.spec, seed=seed)

        with suppress(UserError):
            write()
            found.append(write)
    return found


def _switch(target: Templated) -> str | None:
    """The variable that, when it is set, keeps the template from reading the clock."""
    for name in variables(target.tokenizer, target.spec, target.chat.kwargs.get(TEMPLATE)):
        chat = replace(target.chat, kwargs={**target.chat.kwargs, name: "26 Jul 2024"})
        with suppress(UserError):
            writers = _writers(target, chat)
            if writers and not any(reads_clock(write) for write in writers):
                return name
    return None


def note_readings(target: Templated, folder: str = "", date: str | None = None) -> None:
    """Name, once a process, what the template reads of clock and random numbers.

    Args:
        folder: of samples whose clock stands at `date`; "" = none.
    """
    found, start = readings(target), f"note: the chat template of target {target.spec!r}"
    key = "data.template_kwargs" if folder else "template_kwargs"
    switch = f" ({key}.{found.switch} sets it)" if found.switch else ""
    if found.clock:
        date = date or target.chat.date
        day = "today's date" if date is None else f"{datetime.date.fromisoformat(date):%d %b %Y}"
        say_once(
            f"{start} reads the clock; {f'the samples of {folder}' if folder else 'prompts'} say {day}{switch}"
        )
    if found.random:
        say_once(f"{start} draws at random; here always the same draw")
