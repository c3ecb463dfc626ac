"""How far the writing is."""

from __future__ import annotations

import math
import sys
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from align.common.terminal import PlainConsole
from align.common.text import say

LINE_EVERY = 30.0
"""Seconds between lines where there is no terminal."""


class WritingProgress:
    """A bar on a terminal, a line every `LINE_EVERY` seconds elsewhere; as a context. `longest`: tokens of a sample at most."""

    def __init__(self, total: int, done: int, quiet: bool, longest: int = 0) -> None:
        self.total, self.before, self.samples, self.tokens, self.quiet = total, done, done, 0, quiet
        self.most_tokens = longest * (total - done)
        self.ahead = 0
        """Rows that are at their end and in no shard yet."""
        self.prints_lines = not quiet and not sys.stdout.isatty()
        self.started = self.printed = self.grew = time.monotonic()
        self.bar = Progress(
            TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
            console=PlainConsole(), disable=quiet,
        )  # fmt: skip
        self.task = self.bar.add_task("write", total=total, completed=done, rate="")

    def __enter__(self) -> WritingProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def count(self, tokens: int, rows: int = 0) -> None:
        """So many tokens more were written, and so many rows brought to their end."""
        self.tokens += tokens
        self.ahead += rows
        now = time.monotonic()
        if rows:
            self.grew = now
        rate = f"{self.tokens / max(now - self.started, 1e-9):.0f} tokens/s"
        self.bar.update(self.task, rate=rate, completed=min(self.samples + self.ahead, self.total))
        if not self.prints_lines or now - self.printed < LINE_EVERY:
            return
        self.printed = now
        there = min(self.samples + self.ahead, self.total)
        say(
            f"{there}/{self.total} samples, {self.tokens:,} tokens at {rate}{self._left(now, there - self.before)}"
        )

    def _left(self, now: float, new: int) -> str:
        """The time left: as the rows at their end took, less what has gone by since the last of them; before there is one, the time that
        the longest rows would take."""
        if new > 0:
            left = (self.grew - self.started) / new * (self.total - self.before - new) - (now - self.grew)
            return f", {left / 60:.0f} min left" if left > 0 else ""
        if self.tokens and self.most_tokens > self.tokens:
            seconds = now - self.started
            return f", at most {math.ceil(seconds * (self.most_tokens / self.tokens - 1) / 60)} min left"
        return ""

    def samples_done(self, samples: int, rows: int = 0) -> None:
        """So many samples are in the folder, after a batch of `rows`."""
        first = self.samples == self.before < samples < self.total
        self.samples, self.ahead = samples, max(0, self.ahead - rows)
        if first and not self.quiet:
            minutes = (
                (time.monotonic() - self.started) / (samples - self.before) * (self.total - samples) / 60
            )
            how_long = f"about {minutes:.0f} min" if minutes >= 1 else "under a minute"
            say(f"{how_long} for the other {self.total - samples} samples")
        self.bar.update(self.task, completed=samples)
