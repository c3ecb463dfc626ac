"""An answer as an iterator over pieces of its text."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, closing

import torch

from decode.engine.engine import RequestRunner, run_rounds
from decode.engine.output import Generation
from specalign.common.errors import UserError


class Stream(AbstractContextManager["Stream"]):
    """Iterates over pieces of an answer while it is generated; together they form
    `Generation.text`. Nothing runs between two pieces, and leaving the loop early ends the
    generation.

    Args:
        runner: a request that has not started.
        pieces: the list to which the engine appends its pieces of text.
    """

    def __init__(self, runner: RequestRunner, pieces: list[str]) -> None:
        self._runner = runner
        self._pieces = _iterate(runner, pieces)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation. An incomplete output gets the finish reason `closed` and keeps all
        committed tokens, which can be a few more than were returned."""
        self._pieces.close()
        self._runner.cancel()

    @property
    def output(self) -> Generation:
        """The output with its counts and times. Raises UserError before the end."""
        if not self._runner.out.finish:
            raise UserError("the stream has not ended: iterate to its end, or close() it, first")
        return self._runner.out


@torch.no_grad()
def _iterate(runner: RequestRunner, pieces: list[str]) -> Generator[str, None, Generation]:
    """Run the request."""
    with closing(run_rounds([runner])) as rounds:
        for _ in rounds:
            while pieces:
                yield pieces.pop(0)
    return runner.out
