"""Notes on what a chat template adds to a conversation (the date, random choices) and on tools that
it leaves out."""

from __future__ import annotations

import datetime
import re

from specalign.common.text import say_once
from specalign.folder.chat import Templated
from specalign.rows.conversation import Conversation

_DATE = "date_string"
"""The variable with which Llama's templates take a date instead of the clock's."""
_DRAW = re.compile(r"""\blipsum\b|(\||["']|\bfilter\b)\s*random\b""")
"""jinja's filter `random`, also by its name in `map("random")`, and its function `lipsum`."""


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
