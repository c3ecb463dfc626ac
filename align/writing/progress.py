"""Progress of the writing, as lines."""

from __future__ import annotations

import time

from specalign.common.text import say

LINE_EVERY = 30.0
"""Seconds between lines."""


class WritingProgress:
    """Counts written tokens, finished rows and saved samples, of which `done` exist already."""

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        self.total, self.before, self.samples, self.quiet = total, done, done, quiet
        self.unsaved_rows = 0
        self.tokens = 0
        self.started = self.printed = time.monotonic()

    def count(self, tokens: int, rows: int = 0) -> None:
        """Count tokens that were written, and rows that were finished; print a line now and
        then."""
        self.tokens += tokens
        self.unsaved_rows += rows
        now = time.monotonic()
        if self.quiet or now - self.printed < LINE_EVERY:
            return
        self.printed = now
        done = min(self.samples + self.unsaved_rows, self.total)
        seconds = max(now - self.started, 1e-9)
        left = ""
        if done > self.before:
            minutes = seconds / (done - self.before) * (self.total - done) / 60
            left = f", {minutes:.0f} min left"
        rate = f"{self.tokens:,} tokens at {self.tokens / seconds:.0f} tokens/s"
        say(f"{done}/{self.total} samples, {rate}{left}")

    def save(self, samples: int, rows: int) -> None:
        """Set the number of saved samples, after a batch of `rows`."""
        self.samples = samples
        self.unsaved_rows = max(0, self.unsaved_rows - rows)
