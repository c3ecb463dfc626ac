"""What chat templates write besides the conversation: the date, and random choices."""

from __future__ import annotations

import datetime
import re

from specalign.common.text import say_once
from specalign.folder.chat import Templated
from specalign.folder.rendering import TEMPLATE, check_chosen

DATE_VARIABLE = "date_string"
"""The variable with which Llama's templates take a date instead."""
_DRAW = re.compile(r"""\blipsum\b|(\||["']|\bfilter\b)\s*random\b""")
"""jinja's filter `random`, also by its name in `map("random")`, and its function `lipsum`."""


def today() -> str:
    """The date, ISO."""
    return datetime.date.today().isoformat()


def reads_clock(target: Templated) -> bool:
    """Whether the target's chat template calls the clock of transformers."""
    return DATE_VARIABLE not in target.chat.kwargs and "strftime_now" in _source(target)


def draws_at_random(target: Templated) -> bool:
    """Whether the target's chat template draws random numbers; `render` seeds them."""
    return _DRAW.search(_source(target)) is not None


def _source(target: Templated) -> str:
    """The source of the chosen chat template, and of that for tools; "" without one."""
    if not target.has_chat_template:
        return ""
    name = target.chat.kwargs.get(TEMPLATE)
    templates = target.tokenizer.chat_template
    check_chosen(target.tokenizer, name, target.spec)
    if isinstance(templates, str):
        return templates
    names = ("default", "tool_use") if name is None else (name,)
    return "\n".join(templates.get(name, "") for name in names)


def note_readings(target: Templated, folder: str = "", date: str | None = None) -> None:
    """Report, once a process, a template that writes the date or draws at random.

    Args:
        folder: of samples that have `date`; "" = none.
    """
    start = f"note: the chat template of target {target.spec!r}"
    if reads_clock(target):
        date = date or target.chat.date
        day = f"{datetime.date.fromisoformat(date):%d %b %Y}" if date else "today's date"
        texts = f"the samples of {folder}" if folder else "prompts"
        switch = (
            f" (its variable {DATE_VARIABLE} sets it)" if DATE_VARIABLE in _source(target) else ""
        )
        say_once(f"{start} reads the clock; {texts} say {day}{switch}")
    if draws_at_random(target):
        say_once(f"{start} draws at random; the draw is the same in all prompts (fixed seed)")
