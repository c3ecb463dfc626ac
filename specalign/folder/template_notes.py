"""Notes on what a chat template adds to a conversation (the date, random choices) and what it
leaves out."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from specalign.common.errors import UserError
from specalign.common.text import say_once
from specalign.folder.chat import Templated, chat_text
from specalign.folder.rendering import TEMPLATE
from specalign.rows.conversation import Conversation, Message

_DATE = "date_string"
"""The variable with which Llama's templates take a date instead of the clock's."""
_DRAW = re.compile(r"""\blipsum\b|(\||["']|\bfilter\b)\s*random\b""")
"""jinja's filter `random`, also by its name in `map("random")`, and its function `lipsum`."""
_ignored: dict[tuple[object, ...], tuple[str, ...]] = {}


def today() -> str:
    """The date, ISO."""
    return datetime.date.today().isoformat()


def reads_clock(target: Templated) -> bool:
    """Whether the target's chat template calls the clock of transformers."""
    return _DATE not in target.chat.kwargs and "strftime_now" in _source(target)


def draws_at_random(target: Templated) -> bool:
    """Whether the target's chat template draws random numbers; `render` seeds them."""
    return _DRAW.search(_source(target)) is not None


def _source(target: Templated) -> str:
    """The source of the chosen chat template, and of that for tools; "" without one."""
    if not target.has_chat_template:
        return ""
    name = target.chat.kwargs.get(TEMPLATE)
    templates = target.tokenizer.chat_template
    if isinstance(templates, str):
        return templates
    names = ("default", "tool_use") if name is None else (name,)
    return "\n".join(templates.get(name, "") for name in names)


def note_readings(target: Templated, folder: str = "", date: str | None = None) -> None:
    """Report, once, a template that writes the date (`folder`: its samples') or draws."""
    start = f"note: the chat template of target {target.spec!r}"
    if reads_clock(target):
        date = date or target.chat.date
        day = f"{datetime.date.fromisoformat(date):%d %b %Y}" if date else "today's date"
        texts = f"the samples of {folder}" if folder else "prompts"
        switch = f" (its variable {_DATE} sets it)" if _DATE in _source(target) else ""
        say_once(f"{start} inserts the date; {texts} use {day}{switch}")
    if draws_at_random(target):
        say_once(f"{start} uses randomness; its seed is fixed, so all prompts get the same draw")


def find_ignored(target: Templated, conversation: Conversation) -> tuple[str, ...]:
    """The parts of a conversation that do not change what the target is fed: `tools`, `system
    messages`. Conversations with the same parts in the same order share the result."""
    messages = conversation.messages
    kinds = tuple((m["role"], "tool_calls" in m, "reasoning_content" in m) for m in messages)
    if kinds == (("user", False, False),) and not conversation.tools:
        return ()
    template = str(getattr(target.tokenizer, "chat_template", None))
    key = template, repr(target.chat.kwargs), target.chat.system, kinds, bool(conversation.tools)
    if key not in _ignored:
        chat = replace(target.chat, date=target.chat.date or today())
        try:
            original = chat_text(target.tokenizer, conversation, chat, target.spec)
        except UserError:  # refused, which the caller reports
            return ()
        found = []
        for part, changed in _change_parts(conversation).items():
            with suppress(UserError):
                if chat_text(target.tokenizer, changed, chat, target.spec) == original:
                    found.append(part)
        _ignored[key] = tuple(found)
    return _ignored[key]


def _change_parts(conversation: Conversation) -> dict[str, Conversation]:
    """By the name of each part: the conversation without it or with another text in it."""
    messages = conversation.messages
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)

    def change(message: Message, place: int, role: str) -> Message:
        is_prompt = role == "user" and place >= last
        if message["role"] != role or not message["content"] or is_prompt:
            return message
        return {**message, "content": f"{message['content']} x"}

    changed: dict[str, tuple[Message, ...]] = {}
    for role in dict.fromkeys(m["role"] for m in messages):
        part = "earlier user messages" if role == "user" else f"{role} messages"
        changed[part] = tuple(change(m, i, role) for i, m in enumerate(messages))
    for part, key in (("tool calls", "tool_calls"), ("reasoning", "reasoning_content")):
        changed[part] = tuple({k: v for k, v in m.items() if k != key} for m in messages)
    found = {k: replace(conversation, messages=v) for k, v in changed.items() if v != messages}
    if conversation.tools:
        found["tools"] = replace(conversation, tools=())
    return found


def ignored_notes(target: Templated, ignored: Counter[str], total: str) -> list[str]:
    """A line per part that the template leaves out, with its count of `total` prompts."""
    counts = sorted(ignored.items())
    return [_describe(target, part, f"{count} of {total} prompts") for part, count in counts]


def note_ignored(target: Templated, conversation: Conversation) -> None:
    """Report, once a process, each part of a prompt that is left out."""
    for part in find_ignored(target, conversation):
        say_once(f"note: {_describe(target, part, 'a prompt')}")


def _describe(target: Templated, part: str, of: str) -> str:
    if target.has_chat_template:
        return f"the chat template of target {target.spec!r} leaves out the {part} of {of}"
    return f"target {target.spec!r} has no chat template: the {part} of {of} are left out"
