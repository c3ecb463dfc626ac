"""Tables and progress on the terminal, by rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from specalign.common.text import printable


class PlainConsole(Console):
    """Shows every text as it is: no markup, no emoji, no colour by content, control characters as
    escapes.

    Args:
        wide: break no line where there is no terminal, unless COLUMNS says where.
        options: rich's.
    """

    def __init__(self, wide: bool = False, **options: Any) -> None:
        here = sys.stdout.isatty() or "COLUMNS" in os.environ
        options = {"width": 200 if wide and not here else None, **options}
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Before it is measured: an escape takes more room than its character."""
        return super().render_str(self._shown(text), **options)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Rich's segments; only its own control codes stay codes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else self._shown(text), style, control)

    def on_broken_pipe(self) -> None:
        """Rich would exit with code 1."""
        raise BrokenPipeError

    def _shown(self, text: str) -> str:
        return printable(text)

    def say(self, line: str, wrap: bool = True) -> None:
        """Print a line; `wrap`: broken between words where it is too long."""
        self.print(line, soft_wrap=not wrap)
