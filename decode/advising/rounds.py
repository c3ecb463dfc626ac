"""What a round takes beside the target's call: drafting, drawing, the loop. Timed in the rounds themselves, from one call's end to the
next one's start, so that a machine that changes its pace between two measurements changes nothing.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from align.target.model import Target


class Rounds:
    """Seconds between calls, by how many requests both calls had."""

    def __init__(self) -> None:
        self.between: defaultdict[int, list[float]] = defaultdict(list)
        self._last: tuple[int, float] | None = None
        self._inside = False

    def beside(self, batch: int) -> float | None:
        """Seconds of a round of `batch` requests beside the call, in the middle of all; None where there was no such round."""
        found = self.between.get(batch)
        return statistics.median(found) if found else None

    def timed(self, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its times written down. A call without logits reads a prompt, which is no round."""

        def run(*args: Any, **options: Any) -> Any:
            if self._inside:  # a target that runs the requests of a batch one by one
                return call(*args, **options)
            reads, batch = not options.get("logits", True), len(args[0]) if isinstance(args[0], list) else 1
            started, self._inside = time.perf_counter(), True
            if self._last is not None and self._last[0] == batch and not reads:
                self.between[batch].append(started - self._last[1])
            try:
                output = call(*args, **options)
            finally:
                self._inside = False
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            self._last = None if reads else (batch, time.perf_counter())
            return output

        return run


@contextmanager
def timed_rounds(target: Target) -> Iterator[Rounds]:
    """Inside this context the target's calls are timed."""
    rounds, names = Rounds(), ("forward", "forward_together")
    for name in names:
        setattr(target, name, rounds.timed(target, getattr(target, name)))
    try:
        yield rounds
    finally:
        for name in names:
            delattr(target, name)
