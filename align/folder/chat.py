"""What a target is prompted with beside the messages: its chat template's own switches (`enable_thinking`) and a system prompt."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from inspect import signature
from typing import Any

from align.common.bounded import bounded
from align.common.errors import UserError, in_one_line
from align.common.text import cut, short
from align.folder.rendering import TEMPLATE, TemplateRefusal, check_chosen, check_template_name, render
from align.folder.tokenizer import opening_ids, text_ids
from align.rows.conversation import Conversation

_MARK = "\u2402SYSTEM\u2402"
_GIVEN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
"""What every template is given."""
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "F", "parameters": {"type": "object", "properties": {}}},
}
"""A tool that a template is tried with."""


@dataclass(frozen=True)
class Chat:
    """How a target's chat template is called.

    kwargs: its variables by name, JSON values. system: the system prompt of every conversation that has none; "" is one too.
    date: the day on which a template's clock stands, ISO; None = today.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    date: str | None = None

    @classmethod
    def of(cls, template_kwargs: Any, system: Any) -> Chat:
        """Of arguments of the Python API. Raises UserError for those of another type."""
        if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
            raise UserError(f"template_kwargs must map names to values, not {short(template_kwargs, 60)}")
        if system is not None and not isinstance(system, str):
            raise UserError(f"system must be a text, not {short(system, 60)}")
        return cls(dict(template_kwargs or {}), system)

    def __bool__(self) -> bool:
        return bool(self.kwargs) or self.system is not None

    def apply(self, conversation: Conversation) -> Conversation:
        """The conversation with the system prompt in front of it."""
        messages = conversation.messages
        if self.system is None or (messages and messages[0]["role"] in ("system", "developer")):
            return conversation
        return replace(conversation, messages=({"role": "system", "content": self.system}, *messages))

    @property
    def words(self) -> tuple[str, ...]:
        """The options with which commands of `decode` prompt in the same way."""
        pairs = [f"{key}={_text(value)}" for key, value in self.kwargs.items()]
        system = () if self.system is None else ("--system", self.system)
        return (*(word for pair in pairs for word in ("--template-kwargs", pair)), *system)

    @property
    def said(self) -> str:
        """The same in a few words, for titles: `enable_thinking=false · system prompt "Be brief."`"""
        parts = [f"{key}={_text(value)}" for key, value in self.kwargs.items()]
        if self.system is not None:
            parts.append(f"system prompt {json.dumps(cut(self.system, 60), ensure_ascii=False)}")
        return " · ".join(parts)

    def check(self, tokenizer: Any, spec: str) -> None:
        """Raises UserError for a variable that the tokenizer's template does not read, and for a system prompt that it does
        not take; `spec`: the target's name."""
        if self.system is not None:
            _check_text(self.system)
        if not getattr(tokenizer, "chat_template", None):
            if self.kwargs:
                raise UserError(f"template_kwargs: target {spec!r} has no chat template")
            return
        if self.kwargs:
            self._check_known(tokenizer, spec)
        if self.system is not None:
            _check_system(tokenizer, self.kwargs, spec)

    def _check_known(self, tokenizer: Any, spec: str) -> None:
        if TEMPLATE in self.kwargs:
            check_template_name(tokenizer, self.kwargs[TEMPLATE], spec)
        known = variables(tokenizer, spec, self.kwargs.get(TEMPLATE))
        for name, value in self.kwargs.items():
            if name == TEMPLATE:
                continue
            if name not in known:
                close = get_close_matches(name, known, n=1, cutoff=0.5)
                reads = f"it reads {', '.join(known)}" if known else "it reads nothing but the messages"
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise UserError(
                    f"template_kwargs: the chat template of target {spec!r} has no switch {short(name)}: {reads}{hint}"
                )
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise UserError(f"template_kwargs: {name}={short(value)} is no JSON value") from None


def _text(value: Any) -> str:
    """A value as `read_pair` reads it back."""
    if isinstance(value, str) and _read(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_kwargs(text: str) -> dict[str, Any]:
    """`key=value`, the value as JSON where it is that, else as text; or a JSON object.

    Raises:
        UserError: neither, or a truth value that would be taken for text.
    """
    if text.lstrip().startswith("{"):
        given = _read(text)
        if not isinstance(given, dict):
            raise UserError(f"{short(text)} is no JSON object")
        return given
    key, equals, said = text.partition("=")
    if not equals or not key.isidentifier():
        raise UserError(f"{short(text)} is not key=value (enable_thinking=false)")
    value = _read(said)
    if isinstance(value, str) and value in ("True", "False", "None"):  # as text all of them are true
        raise UserError(
            f"{short(text)}: {value} is text here (did you mean {value.lower().replace('none', 'null')!r}?)"
        )
    return {key: value}


def merged(given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several readings of `read_kwargs` as one. Raises UserError for a key that is given twice."""
    found: dict[str, Any] = {}
    for one in given:
        for key, value in one.items():
            if key in found:
                raise UserError(f"--template-kwargs: {key} is given twice")
            found[key] = value
    return found


def typed(words: Sequence[str]) -> str:
    """Words as one types them in a shell, with a space in front; nothing for none."""
    return f" {shlex.join(words)}" if words else ""


def variables(tokenizer: Any, spec: str, template: str | None = None) -> list[str]:
    """The names that the tokenizer's chat template reads, except those that every template is given.

    Args:
        template: the name of one of several chat templates; None = the default one.

    Raises:
        UserError: it is no template, or none was chosen and there is no default.
    """
    check_chosen(tokenizer, template, spec)
    from jinja2 import Environment, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The block in which a template marks an answer."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=["jinja2.ext.loopcontrols", Generation])
    with in_one_line(f"target {spec!r}: its chat template can't be read"), bounded("it"):
        found = meta.find_undeclared_variables(environment.parse(tokenizer.get_chat_template(template)))
    own = {*signature(tokenizer.apply_chat_template).parameters} - {"tools", "documents"}
    return sorted(found - _GIVEN - own - {*environment.globals} - {*tokenizer.special_tokens_map})


def chat_ids(
    tokenizer: Any, conversation: Conversation, chat: Chat, rows: int, spec: str, where: str = ""
) -> list[int]:
    """A conversation as the tokens that the target continues: through its chat template in one piece, tokenised in one piece. Training,
    decoding and evaluation all call this. Without a chat template: the messages' texts after the tokenizer's own beginning.

    Args:
        rows: how many tokens the target has.
        spec: the target's name; where: what is read, for messages.

    Raises:
        TemplateRefusal: the template refuses the conversation.
        UserError: a token that the target does not have, or a template that takes too long.
    """
    name, text = f"{where and where + ': '}target {spec!r}", chat_text(tokenizer, conversation, chat, spec)
    if getattr(tokenizer, "chat_template", None):
        given = "".join(m["content"] for m in chat.apply(conversation).messages)
        return text_ids(tokenizer, text, rows, name, given)
    return [*opening_ids(tokenizer, rows, name), *text_ids(tokenizer, text, rows, name)]


def chat_text(tokenizer: Any, conversation: Conversation, chat: Chat, spec: str) -> str:
    """The text that `chat_ids` tokenizes. Raises as it does."""
    talk = chat.apply(conversation)
    if getattr(tokenizer, "chat_template", None):
        return render(tokenizer, talk, chat.kwargs, spec, chat.date)
    return "\n\n".join(m["content"] for m in talk.messages)


def _check_text(system: str) -> None:
    try:
        system.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"system: not valid Unicode at character {error.start}") from None


def _check_system(tokenizer: Any, kwargs: Mapping[str, Any], spec: str) -> None:
    """Raises UserError where a system prompt is refused by the template, or left out without a word."""
    talk = Chat(system=_MARK).apply(Conversation.from_text("Hello"))
    try:
        text = render(tokenizer, talk, kwargs, spec)
    except TemplateRefusal as refusal:
        said = f"system: the chat template of target {spec!r} takes no system prompt: {refusal.reason}"
        raise UserError(said) from None
    if _MARK not in text:
        raise UserError(f"system: the chat template of target {spec!r} leaves a system prompt out")
