"""Rows of fixed memory in which requests run, and graphs of the round over them."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from decode.captured.drafting import Drafting, WrappingDrafting
from decode.captured.graph import Backend, Graph, capture
from decode.captured.round import read_result, run_round
from decode.captured.state import RowState, Shape
from decode.engine.output import RoundResult
from decode.engine.request import Prefill, RequestRunner
from decode.speculation.rounds import verify_rounds
from decode.speculation.sampling import uniform
from decode.speculation.settings import Sampling
from specalign.lm.model import Target

BUCKETS = (256, 1024, 4096, 16384, 65536, 262144)
"""The cache entries that a round reads are rounded up to one of these."""
MOST_UNREAD = 48
"""Rounds without drafts after which a drafter that would first have to read what they committed for a
request drafts no more while that runs, because reading costs as much as it saves."""


class Rows:
    """Rows of memory, the round over them, and a graph of it for each bucket of the context. All
    requests have the same settings, but for the seed."""

    def __init__(
        self,
        target: Target,
        drafting: Drafting,
        verifier: str,
        sampling: Sampling,
        shape: Shape,
        backend: Backend,
    ) -> None:
        self.drafting, self.skipped = drafting, WrappingDrafting(drafting)
        self.state = RowState(target, sampling, shape)
        drafting.allocate(self.state)
        self.verifier, self.backend = verifier, backend
        self._graphs: dict[tuple[int, bool], Graph] = {}
        self.unread: dict[int, int] = {}  # tokens of each request, from rounds without drafts

    def run(self, longest: int, skip: bool = False) -> PendingResults:
        """Run a round; no row has more than `longest` cache entries before it. skip: without
        drafts."""
        nodes = 0 if skip else self.drafting.nodes
        needed, capacity = longest + self.state.shape.nodes + 1, self.state.shape.capacity
        end = min(next((size for size in BUCKETS if size >= needed), capacity), capacity)
        if (end, skip) not in self._graphs:
            self._graphs[end, skip] = self._capture(end, skip)
        if self.state.result_BX.device.type != "cuda":
            started = perf_counter()
            self._catch_up(end, skip)
            self._graphs[end, skip].replay()
            results_BX = self.state.result_BX.cpu().clone()
            return PendingResults(results_BX, nodes, perf_counter() - started)
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        self._catch_up(end, skip)
        self._graphs[end, skip].replay()
        copy_BX = torch.empty_like(self.state.result_BX, device="cpu", pin_memory=True)
        copy_BX.copy_(self.state.result_BX, non_blocking=True)
        done.record()
        return PendingResults(copy_BX, nodes, events=(begun, done))

    @property
    def can_draft(self) -> bool:
        """Whether drafting needs no long reading first."""
        return not self.drafting.catches_up or max(self.unread.values()) <= MOST_UNREAD

    @torch.no_grad()
    def _catch_up(self, end: int, skip: bool) -> None:
        most = max(self.unread.values(), default=0)
        if most and not skip:
            self.drafting.catch_up(self.state, end, most)
        self.unread = {row: count + 1 if skip else 0 for row, count in self.unread.items()}

    def _capture(self, end: int, skip: bool) -> Graph:
        state, drafting = self.state, self.skipped if skip else self.drafting
        verifier = self.verifier  # a closure over `self` would keep this memory alive
        running = state.counter("active").clone()
        state.counter("active").zero_()  # while it is captured no row advances
        try:
            return capture(
                lambda: run_round(state, drafting, verifier, end),
                self.backend,
                state.target.device,
                [*state.target.layers, *drafting.layers],
            )
        finally:
            state.counter("active").copy_(running)

    def join(self, row: int, runner: RequestRunner) -> Prefill[int]:
        """Read a request's prompt into a row, with pauses between chunks, and choose its first
        token; returns the row. Rounds may run in the pauses, and what they write into a row that
        does not run is behind its length: behind the whole prompt."""
        state, drafting = self.state, self.drafting
        drafting.clear(row)
        state.counter("length")[row] = len(runner.prompt)
        opened = yield from runner.prefill_into(
            state.cache.row(row),
            drafting.taps,
            lambda output, kept: drafting.read_prompt(row, output),
        )
        runner.commit_prefill(verify_rounds([opened])[0])
        if runner.out.finish:
            return row
        request = runner.request
        drafting.start(row, request.tokens)
        if len(state.u_BT[row]):
            state.u_BT[row] = uniform(state.u_BT.shape[1], request.generator)
            assert request.numbers_T is not None
            state.own_u_BT[row, : runner.limit] = request.numbers_T
        history = request.history
        pairs = ((state.seen_BV, history.seen_V), (state.written_BV, history.written_V))
        for held_BV, its_V in pairs:
            if held_BV is not None and its_V is not None:
                held_BV[row] = its_V
        if state.banned_BV is not None:
            state.banned_BV[row] = False if history.banned_V is None else history.banned_V
        state.start_row(row, request.tokens, runner.limit)
        self.unread[row] = 0
        return row

    def leave(self, row: int) -> None:
        """Stop a row, whose memory the next request takes."""
        self.state.stop_row(row)
        self.unread.pop(row, None)


class PendingResults:
    """Results of a round on their way to the host. nodes: drafted tokens of each row. seconds: of
    the round, known after `wait`. events: around it, on a GPU."""

    def __init__(
        self,
        numbers_BX: Tensor,
        nodes: int,
        seconds: float = 0.0,
        events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None,
    ) -> None:
        self.nodes, self.seconds = nodes, seconds
        self._numbers_BX, self._events = numbers_BX, events

    def wait(self) -> list[RoundResult]:
        """The results of all rows."""
        if self._events is not None:
            begun, done = self._events
            done.synchronize()
            self.seconds = begun.elapsed_time(done) / 1000
        return [read_result(row, self.nodes) for row in self._numbers_BX.tolist()]
