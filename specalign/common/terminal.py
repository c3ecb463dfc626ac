"""Tables and progress on the terminal, by rich."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from specalign.common.text import printable


class PlainConsole(Console):
    """Shows every text as it is: no markup, no emoji, control characters as escapes.

    Args:
        wide: break no line if there is no terminal, unless COLUMNS says where.
        options: rich's.
    """

    def __init__(self, wide: bool = False, **options: Any) -> None:
        if wide and not sys.stdout.isatty() and "COLUMNS" not in os.environ:
            options = {"width": 200, **options}
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escapes before measuring: an escape is wider than its character."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Rich's segments; only its own control codes stay codes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        """Rich would exit with code 1."""
        raise BrokenPipeError

    def say(self, line: str, wrap: bool = True) -> None:
        """Print a line; `wrap`: broken between words if it is too long."""
        self.print(line, soft_wrap=not wrap)
