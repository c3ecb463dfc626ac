"""Progress of a measurement: a bar with the time left on a terminal, elsewhere a line now and then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import monotonic
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from align.common.terminal import PlainConsole
from align.common.text import clock
from decode.reporting.records import Record
from decode.systems.registry import PLAIN

LINE_EVERY = 30.0
"""Seconds between lines where there is no terminal."""


class TaskProgress:
    """Context manager over `total` tasks of one generation per method.

    Args:
        before: tasks done by an earlier run.
        rates: show tokens per second, which are those of one prompt if prompts are not batched.
    """

    def __init__(
        self, console: PlainConsole, total: int, methods: Sequence[str], before: int = 0, rates: bool = True
    ) -> None:
        self.console, self.total, self.methods, self.before = console, total, list(methods), before
        self.rates = rates
        self.finished = before
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self.started = self.printed = monotonic()
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        count = len(self.methods)
        self.row = self.bar.add_task("measuring", total=total * count, completed=before * count)

    def __enter__(self) -> TaskProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def step(self, prompt: str, method: str) -> None:
        """One generation is done."""
        self.bar.update(self.row, advance=1, description=f"{prompt} {self.speeds()}".strip())

    def finish_task(self, records: Sequence[Record]) -> None:
        """One task is done. Prints a line if there is no terminal and the last one is old enough."""
        self.finished += 1
        for record in records:
            self.seconds[record.method] += record.seconds
            self.tokens[record.method] += record.committed
        now = monotonic()
        due = now - self.printed >= LINE_EVERY or self.finished == self.total
        if self.console.is_terminal or not due:
            return
        self.printed = now
        per_task = (now - self.started) / (self.finished - self.before)
        left = clock(per_task * (self.total - self.finished))
        parts = [f"{self.finished}/{self.total} rounds", self.speeds(), f"{left} left"]
        self.console.say(" · ".join(filter(None, parts)))

    def speeds(self) -> str:
        """Each method's tokens per second so far, and its ratio to plain decoding's."""
        speeds = {m: self.tokens[m] / self.seconds[m] for m in self.methods if self.seconds[m] > 0}
        if not self.rates or not speeds:
            return ""
        plain = speeds.get(PLAIN)
        parts = []
        for method, speed in speeds.items():
            ratio = f" ({speed / plain:.2f}×)" if plain and method != PLAIN else ""
            parts.append(f"{method} {speed:.1f}{ratio}")
        return f"{', '.join(parts)} tokens/s"
