"""Chat templates that read the clock or draw at random: told by running them, and run so that they write the same text again."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_CLOCKS = (datetime.datetime(2001, 2, 3, 4, 5, 6), datetime.datetime(2032, 11, 28, 17, 48, 59))
"""Two moments that differ in every field, the day of the week included."""
_DRAWS = 8
"""Seeds that are tried: a template that chooses between two texts shows both but for 1 time in 128."""


@contextmanager
def fixed(date: str | None = None, seed: int = 0) -> Iterator[None]:
    """Run what is inside with Python's random numbers seeded, and where a date is given, with templates' clock at its noon.

    `strftime_now` of transformers reads `datetime` of its module, and hands no argument of ours to templates that is a
    function: its clock is set there.

    Args:
        date: ISO, `2026-11-28`; None = the machine's clock.
    """
    moment = None if date is None else datetime.datetime.fromisoformat(date).replace(hour=12)
    state = random.getstate()
    random.seed(seed)
    try:
        with _clock(moment):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _clock(moment: datetime.datetime | None) -> Iterator[None]:
    if moment is None:
        yield
        return

    from transformers.utils import chat_template_utils  # takes seconds to import; reports do without

    module: Any = chat_template_utils
    before = module.datetime
    module.datetime = _stopped(moment)
    try:
        yield
    finally:
        module.datetime = before


def _stopped(moment: datetime.datetime) -> type[datetime.datetime]:
    """`datetime` whose time does not pass."""

    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return moment.replace(tzinfo=tz)

    return Stopped


def reads_clock(write: Callable[[], str]) -> bool:
    """Whether a text depends on the time at which it is written."""
    texts = set[str]()
    for moment in _CLOCKS:
        with _clock(moment):
            texts.add(write())
    return len(texts) > 1


def draws_at_random(write: Callable[[int], str]) -> bool:
    """Whether a text depends on the seed of Python's random numbers."""
    with _clock(_CLOCKS[0]):
        return len({write(seed) for seed in range(_DRAWS)}) > 1


def today() -> str:
    """The date, ISO."""
    return datetime.date.today().isoformat()
