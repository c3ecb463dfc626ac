"""What a target is prompted with beside the messages: its chat template's own switches (`enable_thinking`) and a system prompt."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from typing import Any

from align.common.bounded import bounded
from align.common.errors import UserError, in_one_line
from align.common.text import cut, short

MOST_WRITTEN = 1 << 20
"""Characters that a chat template may add."""
_MARK = "\u2402SYSTEM\u2402"
_GIVEN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
"""What every template is given."""
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Chat:
    """How a target's chat template is called.

    kwargs: its variables by name, JSON values. system: the system prompt of every conversation that has none; "" is one too.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None

    def __bool__(self) -> bool:
        return bool(self.kwargs) or self.system is not None

    def messages(self, messages: str | Messages) -> Messages:
        """A user's text or a conversation, with the system prompt in front of it."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.system is None or (messages and messages[0]["role"] in ("system", "developer")):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

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
        known = variables(tokenizer, spec)
        for name, value in self.kwargs.items():
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


def variables(tokenizer: Any, spec: str) -> list[str]:
    """The names that the tokenizer's chat template reads, those aside that every template is given. Raises UserError for one
    that is no template."""
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
        found = meta.find_undeclared_variables(environment.parse(tokenizer.get_chat_template()))
    own = {*signature(tokenizer.apply_chat_template).parameters} - {"tools", "documents"}
    return sorted(found - _GIVEN - own - {*environment.globals} - {*tokenizer.special_tokens_map})


def rendered(tokenizer: Any, messages: Messages, kwargs: Mapping[str, Any] | None = None) -> str:
    """The messages in the tokenizer's chat template, up to where the answer begins; a template is a program, and runs bounded. One that
    leaves the last message's text out gets it as a list of parts, as templates of models that see images want it.

    Raises:
        UserError: it takes too long, too much memory, or writes too much.
    """
    given, last = dict(kwargs or {}), messages[-1]["content"].strip() if messages else ""

    def write(talk: list[dict[str, Any]]) -> str:
        with bounded("it"):
            found: str = tokenizer.apply_chat_template(
                talk, tokenize=False, add_generation_prompt=True, **given
            )
        return found

    text = write(list(messages))
    if last not in text:
        with suppress(Exception):  # a template that knows no parts
            parts = write([{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages])
            text = parts if last in parts else text
    most = MOST_WRITTEN + 16 * (sum(len(m["content"]) for m in messages) + len(json.dumps(given)))
    if len(text) > most:
        raise UserError(f"it writes {len(text)} characters, more than {most}")
    return text


def _check_text(system: str) -> None:
    try:
        system.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"system: not valid Unicode at character {error.start}") from None


def _check_system(tokenizer: Any, kwargs: Mapping[str, Any], spec: str) -> None:
    """Raises UserError where a system prompt is refused by the template, or left out without a word."""
    talk = [{"role": "system", "content": _MARK}, {"role": "user", "content": "Hello"}]
    with in_one_line(f"system: the chat template of target {spec!r} takes no system prompt"):
        text = rendered(tokenizer, talk, kwargs)
    if _MARK not in text:
        raise UserError(f"system: the chat template of target {spec!r} leaves a system prompt out")
