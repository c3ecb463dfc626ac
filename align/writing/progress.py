"""Progress of the writing: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import sys
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specalign.common.terminal import PlainConsole
from specalign.common.text import say

LINE_EVERY = 30.0
"""Seconds between lines without a terminal."""


class WritingProgress:
    """Progress over `total` samples, of which `done` exist; a context.

    Args:
        longest: the most tokens of a sample, for an estimate before the first one is finished.
    """

    def __init__(self, total: int, done: int, quiet: bool, longest: int = 0) -> None:
        self.total = total
        self.before = done
        self.samples = done
        self.unsaved_rows = 0
        self.tokens = 0
        self.quiet = quiet
        self.most_tokens = longest * (total - done)
        self.started = time.monotonic()
        self.printed = self.started
        self.bar = Progress(
            TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(), console=PlainConsole(), disable=quiet,
        )  # fmt: skip
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
        rate = f"{self.tokens / max(now - self.started, 1e-9):.0f} tokens/s"
        self.bar.update(self.task, rate=rate, completed=done)
        if self.quiet or sys.stdout.isatty() or now - self.printed < LINE_EVERY:
            return
        self.printed = now
        left = self._estimate_left(now - self.started, done - self.before)
        say(f"{done}/{self.total} samples, {self.tokens:,} tokens at {rate}{left}")

    def _estimate_left(self, seconds: float, new: int) -> str:
        if new > 0:
            left = seconds / new * (self.total - self.before - new)
            return f", {left / 60:.0f} min left"
        if self.most_tokens > self.tokens > 0:
            left = seconds * (self.most_tokens / self.tokens - 1)
            return f", at most {math.ceil(left / 60)} min left"
        return ""

    def samples_done(self, samples: int, rows: int = 0) -> None:
        """Set the number of saved samples, after a batch of `rows`."""
        is_first = self.samples == self.before < samples < self.total
        self.samples = samples
        self.unsaved_rows = max(0, self.unsaved_rows - rows)
        if is_first and not self.quiet:
            left = self.total - samples
            minutes = (time.monotonic() - self.started) / (samples - self.before) * left / 60
            duration = f"about {minutes:.0f} min" if minutes >= 1 else "under a minute"
            say(f"{duration} for the other {left} samples")
        self.bar.update(self.task, completed=samples)
