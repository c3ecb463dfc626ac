"""Chat template variables (such as `enable_thinking`) and the system prompt of a target."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

from specalign.common.errors import UserError, in_one_line, nearest
from specalign.common.text import cut, say_once, short
from specalign.folder.rendering import TemplateRefusal, render
from specalign.folder.tokenizer import opening_ids, text_ids
from specalign.rows.conversation import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JSON = Any
"""A JSON value."""
_MARK = "\u2402SYSTEM\u2402"
_IN_JSON = {"True": "true", "False": "false", "None": "null"}
_DATE = "date_string"
"""The variable with which Llama's templates take a date instead of the clock's."""
_DRAW = re.compile(r"""\blipsum\b|(\||["']|\bfilter\b)\s*random\b""")
"""jinja's filter `random`, also by its name in `map("random")`, and its function `lipsum`."""
_ALWAYS_GIVEN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}


class Templated(Protocol):
    """A target, with its weights or without."""

    spec: str
    tokenizer: PreTrainedTokenizerBase
    chat: Chat

    @property
    def has_chat_template(self) -> bool: ...


@dataclass(frozen=True)
class Chat:
    """How a target's chat template is called.

    kwargs: its variables by name, JSON values. system: the system prompt of conversations without
    one; "" is one too. date: of the template's clock, ISO; None = today.
    """

    kwargs: Mapping[str, JSON] = field(default_factory=dict)
    system: str | None = None
    date: str | None = None

    def __bool__(self) -> bool:
        return bool(self.kwargs) or self.system is not None

    def apply(self, conversation: Conversation) -> Conversation:
        """The conversation with the system prompt in front of it."""
        messages = conversation.messages
        if self.system is None or (messages and messages[0]["role"] in ("system", "developer")):
            return conversation
        system = {"role": "system", "content": self.system}
        return replace(conversation, messages=(system, *messages))

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command-line arguments of `decode` that prompt in the same way."""
        found: list[str] = []
        for key, value in self.kwargs.items():
            found += ["--template-kwargs", f"{key}={_format(value)}"]
        if self.system is not None:
            found += ["--system", self.system]
        return tuple(found)

    @property
    def description(self) -> str:
        """A short description for titles: `enable_thinking=false · system prompt "Be brief."`"""
        parts = [f"{key}={_format(value)}" for key, value in self.kwargs.items()]
        if self.system is not None:
            parts.append(f"system prompt {json.dumps(cut(self.system, 60), ensure_ascii=False)}")
        return " · ".join(parts)

    def check(self, tokenizer: PreTrainedTokenizerBase, spec: str) -> None:
        """Raises UserError for a variable that the tokenizer's template does not read, and a system
        prompt that it does not take; `spec`: the target's name."""
        if not getattr(tokenizer, "chat_template", None):
            if self.kwargs:
                raise UserError(f"template_kwargs: target {spec!r} has no chat template")
            return
        known = find_variables(tokenizer, spec) if self.kwargs else []
        for name in self.kwargs:
            if name not in known:
                raise UserError(
                    f"template_kwargs: the chat template of target {spec!r} has no variable "
                    f"{short(name)}{nearest(name, known)}"
                )
        if self.system is not None:
            self._check_system(tokenizer, spec)

    def _check_system(self, tokenizer: PreTrainedTokenizerBase, spec: str) -> None:
        """Raises UserError if the template refuses a system prompt or silently drops it."""
        conversation = Chat(system=_MARK).apply(Conversation.from_text("Hello"))
        where = f"system: the chat template of target {spec!r}"
        try:
            text = render(tokenizer, conversation, self.kwargs, spec)
        except TemplateRefusal as refusal:
            raise UserError(f"{where} rejects a system prompt: {refusal.reason}") from None
        if _MARK not in text:
            raise UserError(f"{where} ignores the system prompt")


def _format(value: object) -> str:
    """A value as `read_kwargs` reads it back."""
    if isinstance(value, str) and _parse(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _parse(text: str) -> JSON:
    try:
        return json.loads(_IN_JSON.get(text, text))
    except (ValueError, RecursionError):
        return text


def read_kwargs(text: str) -> dict[str, JSON]:
    """`key=value`, the value as JSON or Python's True, False or None if it is that, else as text;
    or a JSON object. Raises UserError for neither."""
    if text.lstrip().startswith("{"):
        kwargs = _parse(text)
        if not isinstance(kwargs, dict):
            raise UserError(f"{short(text)} is not a JSON object")
        return kwargs
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise UserError(f"{short(text)} is not key=value (enable_thinking=false)")
    return {key: _parse(value)}


def merge_kwargs(parts: Sequence[Mapping[str, JSON]]) -> dict[str, JSON]:
    """Several results of `read_kwargs` as one. Raises UserError for a key that is given twice."""
    merged: dict[str, JSON] = {}
    for part in parts:
        for key in part.keys() & merged:
            raise UserError(f"--template-kwargs: {key} is given twice")
        merged |= part
    return merged


def find_variables(tokenizer: PreTrainedTokenizerBase, spec: str) -> list[str]:
    """The variables of the tokenizer's chat template, except those that every template is given.
    Raises UserError if it can't be read."""
    from jinja2 import meta  # slow to import
    from transformers.utils.chat_template_utils import _compile_jinja_template

    with in_one_line(f"target {spec!r}: its chat template can't be read"):
        source = tokenizer.get_chat_template()
        environment = _compile_jinja_template(source).environment
        found = meta.find_undeclared_variables(environment.parse(source))
    parameters = {*signature(tokenizer.apply_chat_template).parameters} - {"tools", "documents"}
    known = {*environment.globals} | {*tokenizer.special_tokens_map}
    return sorted(found - _ALWAYS_GIVEN - parameters - known)


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    chat: Chat,
    rows: int,
    spec: str,
    where: str = "",
) -> list[int]:
    """A conversation as the tokens that the target, which has `rows` tokens, continues. Without a
    chat template: the messages' texts after the tokenizer's opening tokens. Raises TemplateRefusal,
    and UserError for a token that the target lacks."""
    name = f"{where}: target {spec!r}" if where else f"target {spec!r}"
    conversation = chat.apply(conversation)
    if getattr(tokenizer, "chat_template", None):
        text = render(tokenizer, conversation, chat.kwargs, spec, chat.date)
        return text_ids(tokenizer, text, rows, name)
    text = "\n\n".join(message["content"] for message in conversation.messages)
    return [*opening_ids(tokenizer, rows, name), *text_ids(tokenizer, text, rows, name)]


# ---- what a template adds or leaves out ----


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
    """The source of the chat template, and of that for tools; "" without one."""
    templates = target.tokenizer.chat_template if target.has_chat_template else ""
    if isinstance(templates, str):
        return templates
    return "\n".join(templates.get(name, "") for name in ("default", "tool_use"))


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


def describe_ignored(target: Templated, conversation: Conversation) -> str:
    """A line on tools that the chat template does not read; "" if there are none."""
    if not conversation.tools or "tools" in _source(target):
        return ""
    where = "the chat template of target" if target.has_chat_template else "target"
    return f"{where} {target.spec!r} does not use tools: a prompt's are ignored"


def note_ignored(target: Templated, conversation: Conversation) -> None:
    """Report them, once."""
    if line := describe_ignored(target, conversation):
        say_once(f"note: {line}")
