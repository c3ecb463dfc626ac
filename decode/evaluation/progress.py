"""Progress of a measurement: a line now and then."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from time import monotonic

from decode.evaluation.records import Record
from decode.systems.registry import PLAIN
from specalign.common.terminal import PlainConsole
from specalign.common.text import clock

LINE_EVERY = 30.0
"""Seconds between lines."""


class TaskProgress:
    """The progress over `total` tasks, `before` of them done by an earlier run. `rates`: print
    tokens per second, which are those of one prompt if prompts are not batched."""

    def __init__(
        self, console: PlainConsole, total: int, before: int = 0, rates: bool = True
    ) -> None:
        self.console, self.total, self.before, self.rates = console, total, before, rates
        self.finished = before
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: Counter[str] = Counter()
        self.started = self.printed = monotonic()

    def finish_task(self, records: Sequence[Record]) -> None:
        """One task is done. Prints a line if the last one is old enough."""
        self.finished += 1
        for record in records:
            self.seconds[record.method] += record.seconds
            self.tokens[record.method] += record.committed
        now = monotonic()
        if now - self.printed < LINE_EVERY and self.finished < self.total:
            return
        self.printed = now
        per_task = (now - self.started) / (self.finished - self.before)
        left = clock(per_task * (self.total - self.finished))
        parts = [f"{self.finished}/{self.total} rounds", self.speeds(), f"{left} left"]
        self.console.say(" · ".join(filter(None, parts)))

    def speeds(self) -> str:
        """Each method's tokens per second so far, and its ratio to plain decoding's."""
        speeds = {m: self.tokens[m] / seconds for m, seconds in self.seconds.items() if seconds > 0}
        if not self.rates or not speeds:
            return ""
        plain, parts = speeds.get(PLAIN), []
        for method, speed in speeds.items():
            ratio = f" ({speed / plain:.2f}×)" if plain and method != PLAIN else ""
            parts.append(f"{method} {speed:.1f}{ratio}")
        return f"{', '.join(parts)} tokens/s"
