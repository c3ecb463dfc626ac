"""Finds the parts of a conversation that a chat template leaves out, by changing each of them."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

from specalign.common.errors import UserError
from specalign.common.text import say_once
from specalign.folder.chat import Templated, chat_text
from specalign.folder.clock import today
from specalign.rows.conversation import Conversation, Message

_known: dict[tuple[Any, ...], tuple[str, ...]] = {}


def find_ignored(target: Templated, conversation: Conversation) -> tuple[str, ...]:
    """The parts of a conversation that do not change what the target is fed: `tools`, `system
    messages`. Conversations with the same parts in the same order share the result."""
    messages = conversation.messages
    kinds = tuple((m["role"], "tool_calls" in m, "reasoning_content" in m) for m in messages)
    if kinds == (("user", False, False),) and not conversation.tools:
        return ()
    template = str(getattr(target.tokenizer, "chat_template", None))
    key = template, repr(target.chat.kwargs), target.chat.system, kinds, bool(conversation.tools)
    if key not in _known:
        chat = replace(target.chat, date=target.chat.date or today())
        try:
            original = chat_text(target.tokenizer, conversation, chat, target.spec)
        except UserError:  # refused, which the caller reports
            return ()
        ignored = []
        for part, changed in _change_parts(conversation).items():
            with suppress(UserError):
                if chat_text(target.tokenizer, changed, chat, target.spec) == original:
                    ignored.append(part)
        _known[key] = tuple(ignored)
    return _known[key]


def _change_parts(conversation: Conversation) -> dict[str, Conversation]:
    """By the name of each part: the conversation without it or with another text in it."""
    messages = conversation.messages
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    changed: dict[str, tuple[Message, ...]] = {}
    for role in dict.fromkeys(m["role"] for m in messages):
        part = "earlier user messages" if role == "user" else f"{role} messages"
        changed[part] = tuple(
            {**m, "content": f"{m['content']} x"}
            if m["role"] == role and m["content"] and not (role == "user" and i >= last)
            else m
            for i, m in enumerate(messages)
        )
    for part, key in (("tool calls", "tool_calls"), ("reasoning", "reasoning_content")):
        changed[part] = tuple({k: v for k, v in m.items() if k != key} for m in messages)
    found = {
        part: replace(conversation, messages=new)
        for part, new in changed.items()
        if new != messages
    }
    if conversation.tools:
        found["tools"] = replace(conversation, tools=())
    return found


def ignored_notes(target: Templated, ignored: Counter[str], total: str) -> list[str]:
    """A line per part that the template leaves out, with its count of `total` prompts."""
    return [
        _describe(target, part, f"{count} of {total} prompts")
        for part, count in sorted(ignored.items())
    ]


def note_ignored(target: Templated, conversation: Conversation) -> None:
    """Report, once a process, each part of a prompt that is left out."""
    for part in find_ignored(target, conversation):
        say_once(f"note: {_describe(target, part, 'a prompt')}")


def _describe(target: Templated, part: str, of: str) -> str:
    if target.has_chat_template:
        return f"the chat template of target {target.spec!r} leaves out the {part} of {of}"
    return f"target {target.spec!r} has no chat template: the {part} of {of} are left out"
