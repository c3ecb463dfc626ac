"""Conversations rendered through a tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from align.common.bounded import bounded
from align.common.errors import UserError, nearest
from align.common.text import short
from align.folder.clock import fixed
from align.rows.conversation import Conversation, Message

MOST_WRITTEN = 1 << 20
"""Characters that a chat template may add."""


TEMPLATE = "chat_template"
"""The template variable that chooses one of several chat templates by its name."""


class TemplateRefusal(UserError):
    """A chat template raised an error over a conversation. reason: what it said, in one line."""

    def __init__(self, spec: str, reason: str) -> None:
        super().__init__(f"target {spec!r}: its chat template refuses this: {reason}")
        self.reason = reason


def check_template_name(tokenizer: Any, name: object, spec: str) -> None:
    """Raises UserError if the tokenizer has no chat template of that name; `spec`: the target's name."""
    templates = tokenizer.chat_template
    if not isinstance(templates, Mapping):
        raise UserError(
            f"template_kwargs: target {spec!r} has one chat template, without a name: leave {TEMPLATE} out"
        )
    if not isinstance(name, str) or name not in templates:
        raise UserError(
            f"template_kwargs: target {spec!r} has no chat template {short(name)}{nearest(str(name), templates)}"
        )


def check_chosen(tokenizer: Any, name: object, spec: str) -> None:
    """Raises UserError if the tokenizer has several chat templates with no default among them, and none is chosen."""
    templates = tokenizer.chat_template
    if name is not None or not isinstance(templates, Mapping) or "default" in templates:
        return
    raise UserError(
        f"target {spec!r} has chat templates by name and no default one ({', '.join(sorted(templates))}): choose with "
        f"--template-kwargs {TEMPLATE}=NAME, in a recipe data.template_kwargs.{TEMPLATE}=NAME"
    )


def render(
    tokenizer: Any,
    conversation: Conversation,
    kwargs: Mapping[str, Any] | None = None,
    spec: str = "",
    date: str | None = None,
    seed: int = 0,
) -> str:
    """A conversation in the tokenizer's chat template, up to where the answer begins; a template is a program, and runs bounded. One
    that leaves the last message's text out gets it as a list of parts, as templates of models that see images want it.

    Args:
        kwargs: the template's variables.
        spec: the target's name, for messages.
        date: of the template's clock; None = today.
        seed: of its random draws.

    Raises:
        TemplateRefusal: the template raises an error.
        UserError: it takes too long, too much memory, or writes too much; there are several templates and none is chosen.
    """
    given = dict(kwargs or {})
    tools = list(conversation.tools) or given.pop("tools", None)
    check_chosen(tokenizer, given.get(TEMPLATE), spec)
    messages = [_for_template(m) for m in conversation.messages]
    last = messages[-1]["content"].strip() if messages else ""

    def write(talk: list[dict[str, Any]]) -> str:
        with bounded("it"), fixed(date, seed):
            found: str = tokenizer.apply_chat_template(
                talk, tools=tools, tokenize=False, add_generation_prompt=True, **given
            )
        return found

    refused = f"target {spec!r}: its chat template refuses this"
    try:
        text = write(messages)
    except UserError as error:
        raise UserError(f"{refused}: {error}") from None
    except Exception as error:  # whatever a program raises
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise TemplateRefusal(spec, line) from None
    if last not in text:
        with suppress(Exception):  # a template that knows no parts
            parts = write([{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages])
            text = parts if last in parts else text
    most = MOST_WRITTEN + 16 * (len(json.dumps([messages, tools, given], default=str)))
    if len(text) > most:
        raise UserError(f"{refused}: it writes {len(text)} characters, more than {most}")
    return text


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates read it: the arguments of a tool's call as an object, which OpenAI's protocol has as a JSON string."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_with_arguments(call) for call in calls]}


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    with suppress(ValueError, RecursionError):
        parsed = json.loads(arguments or "{}")
        if isinstance(parsed, dict):
            return {**call, "function": {**function, "arguments": parsed}}
    return call
