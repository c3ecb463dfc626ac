"""The captured engine: requests join and leave rows of fixed memory between rounds, and a round's
results are read while the next one runs."""

from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import replace

import torch

from decode.captured.acceptance import BY_RULE, BY_TARGET
from decode.captured.block import BestPaths, BlockChain, DrawnTree
from decode.captured.causal import CausalChain
from decode.captured.copying import CopiedBranch, CopiedChain
from decode.captured.denoising import Denoised
from decode.captured.drafting import Drafting, Unsupported
from decode.captured.graph import Backend, WaitsForDevice
from decode.captured.rows import PendingResults, Rows
from decode.captured.state import Shape
from decode.engine.loop import EagerEngine, read_chunks
from decode.engine.pace import DraftPace, Trials
from decode.engine.request import Prefill, RequestRunner
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.base import Proposer
from decode.proposers.block import BlockProposer
from decode.proposers.diffusion import DiffusionProposer
from decode.proposers.lookup import CopyingProposer, LookupProposer
from decode.speculation.settings import Sampling
from decode.speculation.verifiers import find
from specalign.common.text import say_once
from specalign.lm.model import Target

RowsKey = tuple[Sampling, str, int, tuple[int, ...]]
"""Settings, verifier, number of rows, and the target's EOS ids, which rows know."""
StartedRound = tuple[PendingResults, dict[int, RequestRunner], Trials | None]
"""A round's results, the requests that ran in it, and where its time counts."""
MOST_OPEN = 2
"""Sets of rows whose memory and graphs are kept."""


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
        return CausalChain(proposer)
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
    siblings = proposer.siblings
    # equal siblings each have a token of the target's own: the deepest match would be biased
    if siblings is None or siblings not in rule.siblings or verifier in BY_TARGET:
        raise Unsupported(f"siblings={siblings!r} with verifier {verifier!r}")
    return DrawnTree(proposer, nodes, siblings)


class CapturedEngine:
    """Runs requests in captured rounds. It keeps its memory and its graphs from call to call."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        backend: Backend | None = None,
        paced: bool = False,
    ) -> None:
        self.target, self.proposer = target, proposer
        self.pace = DraftPace((None, 0)) if paced else None
        self._eager = EagerEngine(paced)
        self.backend: Backend = backend or ("cuda" if target.device.type == "cuda" else "eager")
        self._rows: dict[RowsKey, Rows] = {}

    def run_rounds(
        self, runners: Sequence[RequestRunner], most: int = 1
    ) -> Generator[None, None, None]:
        """Run requests to their ends, at most `most` at a time; pauses after chunks of prompts and
        after every round. Requests of different settings run one group after another. What the
        engine can't run falls back to the eager one, with a warning."""
        groups: dict[Hashable, list[RequestRunner]] = {}
        for runner in runners:
            form = (replace(runner.sampling, seed=None), runner.verifier, runner.adapts)
            groups.setdefault(form, []).append(runner)
        for group in groups.values():
            sampling, verifier = replace(group[0].sampling, seed=None), group[0].verifier
            key = (sampling, verifier, min(most, len(group)), tuple(self.target.eos_ids))
            try:
                rows = self._take(key, group)
            except Unsupported as error:
                say_once(f"note: engine=captured does not run this: {error}; using engine=eager")
                yield from self._eager.run_rounds(group, most)
                continue
            try:
                yield from GroupRun(rows, group, self.pace).run()
            except GeneratorExit:  # a stream that was closed
                self._keep(key, rows)
                raise
            self._keep(key, rows)

    def _keep(self, key: RowsKey, rows: Rows) -> None:
        """Keep rows for the next run. While one is under way its rows are its own."""
        self._rows[key] = rows
        while len(self._rows) > MOST_OPEN:  # the ones used longest ago go
            self._rows.pop(next(iter(self._rows)))

    def _take(self, key: RowsKey, group: Sequence[RequestRunner]) -> Rows:
        """Rows of memory for a group of equal settings: kept ones that are large enough, or new
        ones."""
        sampling, verifier, count, _ = key
        check_target(self.target)
        drafting = make_drafting(self.proposer, sampling, verifier)
        longest = max(len(runner.prompt) + runner.limit for runner in group)
        drafting.check(longest)
        most = self.target.context_limit + drafting.nodes + 1
        capacity = min(_round_up(longest + drafting.nodes + 1), most)
        new_tokens = _round_up(max(runner.limit for runner in group))
        rows = self._rows.pop(key, None)
        if rows is not None:
            capacity = max(capacity, rows.state.shape.capacity)
            new_tokens = max(new_tokens, rows.state.shape.new_tokens)
        shape = Shape(count, capacity, new_tokens, drafting.nodes)
        if rows is not None and rows.state.shape == shape:
            return rows
        rows = None  # frees its memory first
        try:
            rows = Rows(self.target, drafting, verifier, sampling, shape, self.backend)
            rows.run(max(len(runner.prompt) for runner in group))
            return rows
        except WaitsForDevice as error:
            why = f"a round waits for the device ({error})"
        except torch.OutOfMemoryError:
            why = f"not enough memory for {count} rows of {capacity:,} tokens"
            self._rows.clear()
        rows = None  # not held by the error
        raise Unsupported(why)


def _round_up(size: int) -> int:
    """To a power of two, so that few sizes are captured."""
    return 1 << (size - 1).bit_length()


class GroupRun:
    """Requests of equal settings, in the rows of an engine.

    free_rows: those without a request. pending: the round that the host has not read. pace: of the
    sizes of drafts, where they are measured.
    """

    def __init__(self, rows: Rows, group: Sequence[RequestRunner], pace: DraftPace | None) -> None:
        self.rows, self.waiting = rows, list(reversed(group))
        self.free_rows = list(reversed(range(rows.state.shape.rows)))
        self.joining: dict[RequestRunner, Prefill[int]] = {}
        self.running: dict[int, RequestRunner] = {}
        self.pending: StartedRound | None = None
        self.pace = pace if group[0].adapts and rows.state.shape.nodes else None

    def run(self) -> Iterator[None]:
        """Run all requests; pauses after chunks of prompts and after every round."""
        try:
            while self.waiting or self.joining or self.running:
                yield from self._join()
                following = self._begin_round() if self.running else None
                self._commit()
                self.pending = following
                yield
        finally:
            for row in range(self.rows.state.shape.rows):
                self.rows.leave(row)

    def _join(self) -> Iterator[None]:
        while self.waiting and self.free_rows:
            runner = self.waiting.pop()
            self.joining[runner] = self.rows.join(self.free_rows.pop(), runner)
        if not self.joining:
            return
        for runner, row in read_chunks(self.joining).items():
            if runner.out.finish:
                self._leave(row, runner)
            else:
                self.running[row] = runner
        yield

    def _begin_round(self) -> StartedRound:
        # a round may be under way that the host has not read
        ahead = 0 if self.pending is None else self.rows.state.shape.nodes + 1
        longest = max(runner.length for runner in self.running.values()) + ahead
        trials = None
        if self.pace is not None:
            trials = self.pace.of(self.rows.state.shape.rows, longest)
        draining = self.rows.state.shape.rows > 1 and not (self.waiting or self.joining)
        skip = trials is not None and (not self.rows.can_draft or trials.choose(draining) == 0)
        return self.rows.run(longest, skip), dict(self.running), trials

    def _leave(self, row: int, runner: RequestRunner) -> None:
        self.rows.leave(row)
        self.free_rows.append(row)
        runner.free()

    def _commit(self) -> None:
        """Commit the results of the round before; a request that ends leaves its row."""
        if self.pending is None:
            return
        pending, running, trials = self.pending
        results, tokens = pending.wait(), 0
        for row, runner in running.items():
            if runner.out.finish:
                continue
            if not results[row].tokens:
                raise RuntimeError(f"row {row} stopped before the end of its output")
            runner.commit_result(results[row], self.rows.drafting.chains)
            tokens += len(results[row].tokens)
            if runner.out.finish:
                del self.running[row]
                self._leave(row, runner)
        if trials is not None and tokens:  # none: all had ended before the round
            size = None if pending.nodes else 0
            # a round costs the same however many of its rows run
            trials.observe(size, tokens / len(running), pending.seconds)
