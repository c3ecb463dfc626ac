"""The captured engine: requests join and leave rows of fixed memory between rounds, and a round's
results are read while the next one runs."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode.captured.acceptance import BY_RULE, BY_TARGET
from decode.captured.block import BestPaths, BlockChain, DrawnTree
from decode.captured.causal import CausalChain
from decode.captured.copying import CopiedBranch, CopiedChain
from decode.captured.denoising import Denoised
from decode.captured.drafting import Drafting, Unsupported
from decode.captured.graph import Backend, Graph, WaitsForDevice, capture
from decode.captured.round import read_result, run_round
from decode.captured.state import RowState, Shape
from decode.engine import loop
from decode.engine.loop import RequestRunner
from decode.engine.output import RoundResult
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.base import Proposer
from decode.proposers.block import BlockProposer
from decode.proposers.diffusion import DiffusionProposer
from decode.proposers.lookup import CopyingProposer, LookupProposer
from decode.speculation.rounds import verify_rounds
from decode.speculation.sampling import uniform
from decode.speculation.settings import Sampling
from decode.speculation.verifiers import find
from specalign.common.text import say_once
from specalign.lm.model import Target

BUCKETS = (256, 1024, 4096, 16384, 65536, 262144)
"""Cache entries that a round reads, and the memory of a row, are rounded up to one of these."""


def check_target(target: Target) -> None:
    """Raises Unsupported for a target whose forward pass does not have fixed shapes."""
    anatomy = target.anatomy
    if not target.together or anatomy.others or target.chains_only:
        raise Unsupported("the target has recurrent states or its own attention or cache")
    if any(shape is not None and shape.indexer for shape in anatomy.shapes):
        raise Unsupported("the target selects keys by an index")


def make_drafting(proposer: Proposer | None, sampling: Sampling, verifier: str) -> Drafting:
    """The tensor form of a proposer. Raises Unsupported for one that has none."""
    rule = find(verifier)
    if rule.lossy or not (sampling.greedy or verifier in BY_TARGET | BY_RULE):
        raise Unsupported(f"verifier {verifier!r}")
    if proposer is None:
        return Drafting()
    if isinstance(proposer, CopyingProposer):
        inner, law = make_drafting(proposer.inner, sampling, verifier), proposer.law(sampling)
        count = min(proposer.copy_tokens, proposer.most_tokens)
        if law == "point":
            return CopiedBranch(inner, count)
        if law == "unmasked" or not inner.chains:
            raise Unsupported("copying next to drawn drafts that branch or have an order")
        return CopiedChain(inner, count)
    if isinstance(proposer, LookupProposer):
        return CopiedBranch(Drafting(), proposer.draft_tokens, proposer.shortest, proposer.longest)
    if isinstance(proposer, AutoregressiveProposer):
        return CausalChain(proposer, sampling)
    if isinstance(proposer, DiffusionProposer):
        if proposer.order == "random":
            raise Unsupported("order=random")
        return Denoised(proposer, sampling)
    if not isinstance(proposer, BlockProposer) or proposer.confidence:
        raise Unsupported(f"drafter {proposer.name!r}")
    nodes = proposer.nodes(sampling)
    if not nodes:
        return BlockChain(proposer, proposer.draft_tokens)
    if proposer.law(sampling) == "point":
        return BestPaths(proposer, nodes)
    if proposer.siblings is None or proposer.siblings not in rule.siblings:
        raise Unsupported(f"siblings={proposer.siblings!r}")
    return DrawnTree(proposer, nodes, proposer.siblings)


class Rows:
    """Rows of memory, the round over them, and a graph of it for each bucket of the context. All
    requests have the same settings, but for the seed."""

    def __init__(
        self,
        target: Target,
        drafting: Drafting,
        verifier: str,
        sampling: Sampling,
        rows: int,
        capacity: int,
        backend: Backend,
    ) -> None:
        self.drafting = drafting
        self.state = RowState(target, sampling, Shape(rows, capacity, drafting.nodes))
        drafting.allocate(self.state)
        self.verifier, self.backend = verifier, backend
        self._graphs: dict[int, Graph] = {}
        self._on_host = torch.zeros_like(
            self.state.result_BX, device="cpu", pin_memory=target.device.type == "cuda"
        )

    def run(self, longest: int) -> None:
        """Run a round; no row has more than `longest` cache entries before it."""
        end = _bucket(longest + self.state.shape.nodes + 1)
        end = min(end, self.state.shape.capacity)
        if end not in self._graphs:
            self._graphs[end] = self._capture(end)
        self._graphs[end].replay()

    def _capture(self, end: int) -> Graph:
        state = self.state
        running = state.counter("active").clone()
        state.counter("active").zero_()  # while it is captured no row advances
        graph = capture(
            lambda: run_round(state, self.drafting, self.verifier, end),
            self.backend,
            state.target.device,
        )
        state.counter("active").copy_(running)
        return graph

    def join(self, row: int, runner: RequestRunner) -> None:
        """Read a request's prompt into a row and choose its first token."""
        state, drafting = self.state, self.drafting
        opened = runner.prefill_into(
            state.cache.row(row),
            drafting.taps,
            lambda output, kept: drafting.read_prompt(row, output),
        )
        runner.commit_prefill(verify_rounds([opened])[0])
        if runner.out.finish:
            return
        request = runner.request
        drafting.start(row, request.tokens)
        if len(state.u_BT[row]):
            state.u_BT[row] = uniform(state.u_BT.shape[1], request.generator)
        history = request.history
        for held_BV, its_V in (
            (state.seen_BV, history.seen_V),
            (state.written_BV, history.written_V),
        ):
            if held_BV is not None and its_V is not None:
                held_BV[row] = its_V
        if state.banned_BV is not None:
            state.banned_BV[row] = False if history.banned_V is None else history.banned_V
        state.start_row(row, request.tokens, runner.limit)

    def leave(self, row: int) -> None:
        """Stop a row, whose memory the next request takes."""
        self.state.stop_row(row)

    def read(self) -> PendingResults:
        """Begin to copy the results of the round that ran last."""
        if self.state.result_BX.device.type != "cuda":
            return PendingResults(self.state.result_BX.cpu().clone(), self.state.shape.nodes)
        copy = torch.empty_like(self._on_host, pin_memory=True)
        copy.copy_(self.state.result_BX, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return PendingResults(copy, self.state.shape.nodes, done)


class PendingResults:
    """Results of a round on their way to the host."""

    def __init__(
        self, numbers_BX: Tensor, nodes: int, done: torch.cuda.Event | None = None
    ) -> None:
        self._numbers_BX, self._nodes, self._done = numbers_BX, nodes, done

    def wait(self) -> list[RoundResult]:
        """The results of all rows."""
        if self._done is not None:
            self._done.synchronize()
        return [read_result(row, self._nodes) for row in self._numbers_BX.tolist()]


def _bucket(size: int) -> int:
    return next((bucket for bucket in BUCKETS if bucket >= size), size)


class CapturedEngine:
    """Runs requests in captured rounds. It keeps its memory and its graphs from call to call."""

    def __init__(
        self, target: Target, proposer: Proposer | None, backend: Backend | None = None
    ) -> None:
        self.target, self.proposer = target, proposer
        self.backend: Backend = backend or ("cuda" if target.device.type == "cuda" else "eager")
        self._rows: dict[Hashable, Rows] = {}

    def run_rounds(
        self, runners: Sequence[RequestRunner], most: int = 1
    ) -> Generator[None, None, None]:
        """Run requests to their ends, at most `most` at a time; pauses after every prefill and
        round. Requests of different settings run one group after another. What the engine can't
        run falls back to the eager one, with a warning."""
        groups: dict[Hashable, list[RequestRunner]] = {}
        for runner in runners:
            form = (replace(runner.sampling, seed=None), runner.verifier)
            groups.setdefault(form, []).append(runner)
        for group in groups.values():
            try:
                rows = self._open(group, most)
            except Unsupported as error:
                say_once(f"note: engine=captured does not run this: {error}; using engine=eager")
                yield from loop.run_rounds(group, most)
            else:
                yield from _run_group(rows, group)

    def _open(self, group: Sequence[RequestRunner], most: int) -> Rows:
        """Rows of memory for a group of equal settings, allocated before or now."""
        first = group[0]
        sampling, count = replace(first.sampling, seed=None), min(most, len(group))
        check_target(self.target)
        drafting = make_drafting(self.proposer, sampling, first.verifier)
        longest = max(len(runner.prompt) + runner.limit for runner in group)
        drafting.check(longest)
        capacity = _bucket(longest + drafting.nodes + 1)
        key = (sampling, first.verifier, count, capacity)
        if key not in self._rows:
            rows = Rows(
                self.target, drafting, first.verifier, sampling, count, capacity, self.backend
            )
            try:
                rows.run(0)
            except WaitsForDevice as error:
                raise Unsupported(f"a round waits for the device ({error})") from None
            self._rows[key] = rows
        return self._rows[key]


def _run_group(rows: Rows, group: Sequence[RequestRunner]) -> Iterator[None]:
    waiting = list(reversed(group))
    running: dict[int, RequestRunner] = {}
    pending: tuple[PendingResults, dict[int, RequestRunner]] | None = None
    try:
        while waiting or running:
            for row in range(rows.state.shape.rows):
                if waiting and row not in running:
                    runner = waiting.pop()
                    rows.join(row, runner)
                    if not runner.out.finish:
                        running[row] = runner
                    yield
            if running:
                # a round may be under way that the host has not read
                ahead = 0 if pending is None else rows.state.shape.nodes + 1
                rows.run(max(runner.length for runner in running.values()) + ahead)
            latest = (rows.read(), dict(running)) if running else None
            if pending is not None:
                _commit(rows, running, *pending)
            pending = latest
            yield
    finally:
        for row in range(rows.state.shape.rows):
            rows.leave(row)


def _commit(
    rows: Rows,
    running: dict[int, RequestRunner],
    pending: PendingResults,
    then_running: dict[int, RequestRunner],
) -> None:
    """Commit the results of a round; a request that ends leaves its row."""
    results = pending.wait()
    for row, runner in then_running.items():
        if runner.out.finish:
            continue
        runner.commit_result(results[row], rows.drafting.chains)
        if runner.out.finish:
            del running[row]
            rows.leave(row)
            runner.free()
