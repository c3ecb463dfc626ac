"""Renders conversations through a tokenizer's chat template."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.rows.conversation import Conversation, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEED = 0
"""Of a template's random draws."""


class TemplateRefusal(UserError):
    """A chat template raised an error over a conversation. reason: its message, in one line."""

    def __init__(self, spec: str, reason: str) -> None:
        super().__init__(f"target {spec!r}: its chat template rejects this: {reason}")
        self.reason = reason


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    kwargs: Mapping[str, object] | None = None,
    spec: str = "",
    date: str | None = None,
) -> str:
    """A conversation in the tokenizer's chat template with these variables, up to where the answer
    begins. Random draws are seeded: a conversation is always rendered alike. `date`: of the
    template's clock, ISO; None = today. Raises TemplateRefusal if the template raises an error."""
    options: JsonObject = {"tools": None, **(kwargs or {})}
    if conversation.tools:
        options["tools"] = list(conversation.tools)
    messages = [_with_parsed_arguments(message) for message in conversation.messages]

    def apply(messages: list[Message]) -> str:
        with _fixed_date(date), _seed_random():
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        return str(text)

    try:
        text = apply(messages)
    except Exception as error:  # whatever a program raises
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise TemplateRefusal(spec, line) from None
    last = messages[-1]["content"].strip() if messages else ""
    if last not in text:  # templates of vision models read a list of parts
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        with suppress(Exception):
            other = apply(parts)
            text = other if last in other else text
    return text


@contextmanager
def _seed_random() -> Iterator[None]:
    """Seed Python's random numbers, which jinja draws from, and restore their state."""
    state = random.getstate()
    random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def _fixed_date(date: str | None) -> Iterator[None]:
    """Set the clock of templates to noon of a date, ISO. transformers passes no argument of ours to
    `strftime_now`, which reads `datetime` of its module."""
    if date is None:
        yield
        return
    from transformers.utils import chat_template_utils  # slow to import

    noon = datetime.datetime.fromisoformat(date).replace(hour=12)
    module: Any = chat_template_utils
    original = module.datetime
    module.datetime = SimpleNamespace(now=lambda: noon)
    try:
        yield
    finally:
        module.datetime = original


def _with_parsed_arguments(message: Message) -> Message:
    """A message with the arguments of tool calls as objects; OpenAI writes JSON strings."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_parse_arguments(call) for call in calls]}


def _parse_arguments(call: JsonObject) -> JsonObject:
    try:
        text = call["function"]["arguments"]
        arguments = {} if text == "" else json.loads(text)
    except (KeyError, TypeError, ValueError, RecursionError):  # objects already, or no JSON
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}
