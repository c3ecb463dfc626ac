"""Finds the parts of a conversation that a chat template leaves out, by rendering the conversation with each part changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from align.common.errors import UserError
from align.common.text import say_once
from align.folder.chat import chat_text
from align.folder.clock import today
from align.folder.readings import Templated
from align.rows.conversation import Conversation, Message

_known: dict[tuple[Any, ...], tuple[str, ...]] = {}


def ignored_parts(target: Templated, conversation: Conversation) -> tuple[str, ...]:
    """The parts of a conversation that change nothing of what the target is fed: `tools`, `system messages`. It is rendered once for
    each part; conversations with the same parts in the same order share the result."""
    messages = conversation.messages
    kinds = tuple((m["role"], "tool_calls" in m, "reasoning_content" in m) for m in messages)
    if kinds == (("user", False, False),) and not conversation.tools:
        return ()
    template = str(getattr(target.tokenizer, "chat_template", None))
    chat = repr(target.chat.kwargs), target.chat.system
    key = template, chat, kinds, bool(conversation.tools)
    if key not in _known:
        with suppress(UserError):  # refused, which the caller reports
            _known[key] = _find(target, conversation)
    return _known.get(key, ())


def _find(target: Templated, conversation: Conversation) -> tuple[str, ...]:
    chat = replace(target.chat, date=target.chat.date or today())
    found = []
    whole = chat_text(target.tokenizer, conversation, chat, target.spec)
    for part, changed in _changed(conversation).items():
        with suppress(UserError):
            if chat_text(target.tokenizer, changed, chat, target.spec) == whole:
                found.append(part)
    return tuple(found)


def _changed(conversation: Conversation) -> dict[str, Conversation]:
    """For each part that a conversation has, by its name, the conversation without it or with other text in it."""
    messages, found = conversation.messages, dict[str, Conversation]()

    def add(part: str, changed: Iterable[Message]) -> None:
        new = tuple(changed)
        if new != messages:
            found[part] = replace(conversation, messages=new)

    for role in dict.fromkeys(m["role"] for m in messages if m["role"] != "user"):
        add(f"{role} messages", (_reword(m) if m["role"] == role and m["content"] else m for m in messages))
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    add(
        "earlier user messages",
        (_reword(m) if i < last and m["role"] == "user" else m for i, m in enumerate(messages)),
    )
    for part, key in (("tool calls", "tool_calls"), ("reasoning", "reasoning_content")):
        add(part, ({name: held for name, held in m.items() if name != key} for m in messages))
    if conversation.tools:
        found["tools"] = replace(conversation, tools=())
    return found


def _reword(message: Message) -> Message:
    return {**message, "content": f"{message['content']} x"}


def ignored_notes(target: Templated, ignored: Counter[str], total: str) -> list[str]:
    """One line for each part that the template leaves out, with its count. total: the number of prompts checked."""
    return [_describe(target, part, f"{count} of {total} prompts") for part, count in sorted(ignored.items())]


def note_ignored(target: Templated, conversation: Conversation) -> None:
    """Name, once a process, each part of a prompt that is left out."""
    for part in ignored_parts(target, conversation):
        say_once(f"note: {_describe(target, part, 'a prompt')}")


def _describe(target: Templated, part: str, of: str) -> str:
    if target.has_chat_template:
        return f"the chat template of target {target.spec!r} leaves out the {part} of {of}"
    return f"target {target.spec!r} has no chat template: the {part} of {of} are left out"
