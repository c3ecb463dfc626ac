"""The date that chat templates write."""

from __future__ import annotations

import datetime

from specalign.common.text import say_once
from specalign.folder.chat import Templated
from specalign.folder.rendering import TEMPLATE, check_chosen

DATE_VARIABLE = "date_string"
"""The variable with which Llama's templates take a date instead."""


def today() -> str:
    """The date, ISO."""
    return datetime.date.today().isoformat()


def reads_clock(target: Templated) -> bool:
    """Whether the target's chat template calls the clock of transformers."""
    kwargs = target.chat.kwargs
    if not target.has_chat_template or DATE_VARIABLE in kwargs:
        return False
    check_chosen(target.tokenizer, kwargs.get(TEMPLATE), target.spec)
    return "strftime_now" in target.tokenizer.get_chat_template(kwargs.get(TEMPLATE))


def note_clock(target: Templated, folder: str = "", date: str | None = None) -> None:
    """Report, once a process, a template that writes the date.

    Args:
        folder: of samples that have `date`; "" = none.
    """
    if not reads_clock(target):
        return
    date = date or target.chat.date
    day = f"{datetime.date.fromisoformat(date):%d %b %Y}" if date else "today's date"
    texts = f"the samples of {folder}" if folder else "prompts"
    say_once(
        f"note: the chat template of target {target.spec!r} reads the clock; {texts} say {day}"
    )
