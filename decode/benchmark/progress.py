"""The progress of a measurement: on a terminal a bar with the time left, elsewhere a line now and then."""

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
from decode.method_names import PLAIN
from decode.reporting.records import Record

LINE_EVERY = 30.0
"""Seconds between lines where there is no terminal."""


class TaskProgress:
    """Context manager over `total` tasks with a generation of each of `methods`; `before` of them were done by an earlier run.
    `rates`: tell tokens a second, which are those of a prompt where it is decoded by itself."""

    def __init__(
        self, console: PlainConsole, total: int, methods: Sequence[str], before: int = 0, rates: bool = True
    ) -> None:
        self.rates = rates
        self.console, self.total, self.methods, self.before = console, total, list(methods), before
        self.finished = before
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self.started = self.spoken = monotonic()
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
        each = len(self.methods)
        self.row = self.bar.add_task("measuring", total=total * each, completed=before * each)

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

    def done(self, records: Sequence[Record]) -> None:
        """One task is done. Where there is no terminal, prints a line if the last one is old enough."""
        self.finished += 1
        for record in records:
            self.seconds[record.method] += record.seconds
            self.tokens[record.method] += record.committed
        now = monotonic()
        if not self.console.is_terminal and (now - self.spoken >= LINE_EVERY or self.finished == self.total):
            self.spoken = now
            left = (now - self.started) / (self.finished - self.before) * (self.total - self.finished)
            said = [f"{self.finished}/{self.total} rounds", self.speeds(), f"{clock(left)} left"]
            self.console.say(" · ".join(part for part in said if part))

    def speeds(self) -> str:
        """Tokens/s of every method so far, and its ratio to plain decoding's."""
        if not self.rates:
            return ""
        rates = {m: self.tokens[m] / self.seconds[m] for m in self.methods if self.seconds[m] > 0}
        base = rates.get(PLAIN)
        return ", ".join(
            f"{m} {rate:.1f}" + (f" ({rate / base:.2f}×)" if base and m != PLAIN else "")
            for m, rate in rates.items()
        ) + (" tokens/s" if rates else "")


class RaceProgress:
    """A line for every round of a race between settings (decode/benchmark/tuning.py)."""

    def __init__(self, console: PlainConsole, total: int) -> None:
        self.console, self.total, self.finished, self.ran = console, total, 0, 0
        self.seconds, self.began = 0.0, 0.0

    def begin(self) -> None:
        """A round begins to run. (Rounds of an earlier run are read and do not begin.)"""
        self.began = monotonic()
        self.ran += 1

    def done(self, left: int) -> None:
        """A round is over, and `left` settings are still in the race."""
        self.finished += 1
        if not self.began:
            return
        self.seconds, self.began = self.seconds + monotonic() - self.began, 0.0
        rest = clock(self.seconds / self.ran * (self.total - self.finished))
        text = f"round {self.finished}/{self.total}: {left} settings left · {rest} left at most"
        self.console.say(text)
