"""Progress of the writing: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specalign.common.terminal import PlainConsole
from specalign.common.text import say

LINE_EVERY = 30.0
"""Seconds between lines without a terminal."""


class WritingProgress:
    """Progress over `total` samples, of which `done` exist; a context."""

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        self.total, self.before, self.samples = total, done, done
        self.unsaved_rows = 0
        self.tokens = 0
        self.quiet = quiet
        self.started = self.printed = time.monotonic()
        self.bar = Progress(
            TextColumn("writing"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=PlainConsole(),
            disable=quiet,
        )
        self.task = self.bar.add_task("write", total=total, completed=done, rate="")

    def __enter__(self) -> WritingProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def count(self, tokens: int, rows: int = 0) -> None:
        """Count tokens that were written, and rows that were finished."""
        self.tokens += tokens
        self.unsaved_rows += rows
        done = min(self.samples + self.unsaved_rows, self.total)
        now = time.monotonic()
        seconds = max(now - self.started, 1e-9)
        rate = f"{self.tokens / seconds:.0f} tokens/s"
        self.bar.update(self.task, rate=rate, completed=done)
        if self.quiet or sys.stdout.isatty() or now - self.printed < LINE_EVERY:
            return
        self.printed = now
        left = ""
        if done > self.before:
            minutes = seconds / (done - self.before) * (self.total - done) / 60
            left = f", {minutes:.0f} min left"
        say(f"{done}/{self.total} samples, {self.tokens:,} tokens at {rate}{left}")

    def samples_done(self, samples: int, rows: int = 0) -> None:
        """Set the number of saved samples, after a batch of `rows`."""
        self.samples = samples
        self.unsaved_rows = max(0, self.unsaved_rows - rows)
        self.bar.update(self.task, completed=samples)
