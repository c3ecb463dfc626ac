"""Records rounds of the captured engine, each as one round of every request in it.

They run operator by operator in place of graphs, because a graph shows nothing of what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decode.captured import acceptance, block, causal, denoising
from decode.captured import round as round_module
from decode.captured import rows as rows_module
from decode.captured.acceptance import Path
from decode.captured.drafting import Draft, Drafting
from decode.captured.graph import Backend, Function, Graph, capture
from decode.captured.rows import Rows
from decode.captured.state import RowState
from decode.engine.decoder import Decoder
from decode.engine.request import Prefill, RequestRunner
from decode.speculation.proposal import NO_DRAFTS, DraftProbs, Proposal, Siblings
from decode.speculation.rounds import Round
from decode.speculation.rules import Outcomes
from decode.speculation.sampling import ProcessorState
from decode.speculation.settings import Sampling
from decode.speculation.verifiers import Outcome, Verdict
from decode.verification.recorded import RecordedRequest, RecordedRound
from decode.verification.recording import Original, Recorder, Watch
from decode.verification.sources import DraftSource
from decode.verification.verdict import Tally
from specalign.common.schema import JsonObject

GRAPH_TOKENS = 16
BORDERS = range(4, 2**18, 4)
"""In place of `rows.BUCKETS`, so that short texts cross many borders."""


def check_graphs(
    name: str,
    make_decoder: Callable[[], Decoder],
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Sampling],
    tally: Tally,
) -> None:
    """Graphs write what their operators write when they run one by one. In fp32: in half precision
    products may be rounded otherwise in a graph."""
    graphs, operators = make_decoder(), make_decoder()

    def capture_operators(
        function: Function, _: Backend, device: torch.device, layers: object
    ) -> Graph:
        return capture(function, "eager", device)

    for sampling in settings:
        options: JsonObject = {"sampling": sampling, "batch_size": 2}
        texts = graphs.generate_batch(prompts, GRAPH_TOKENS, **options)
        with mock.patch.object(rows_module, "capture", capture_operators):
            wanted = operators.generate_batch(prompts, GRAPH_TOKENS, **options)
        for i, (one, other) in enumerate(zip(texts, wanted, strict=True)):
            tally.place = {"method": name, "prompt": i}
            what = f"{name}, {sampling}: a graph writes another text than its operators"
            tally.expect("texts of graphs", one.tokens == other.tokens, what)


class EngineRecorder(Recorder):
    """A recorder of both engines."""

    def __enter__(self) -> EngineRecorder:
        self._stack.enter_context(mock.patch.object(rows_module, "BUCKETS", BORDERS))
        # by state, of each row; an `id` would return with the state of later rows
        self._rows: WeakKeyDictionary[RowState, dict[int, RecordedRequest]] = WeakKeyDictionary()
        self._running: dict[int, RecordedRequest] = {}
        self._forget()
        super().__enter__()
        return self

    def _forget(self) -> None:
        """A round begins. drawn: the random numbers of its drafts; seen: what decides it."""
        self._drawn: list[Tensor] = []
        self._seen: dict[str, Tensor] = {}

    def _watches(self) -> list[Watch]:
        return [
            *super()._watches(),
            *((module, "draw_at", self._draw_draft) for module in (block, causal, denoising)),
            (RequestRunner, "prefill_into", self._prefill),
            (rows_module, "verify_rounds", self._verify),
            (rows_module, "capture", self._capture),
            (rows_module, "run_round", self._run_round),
            (Rows, "join", self._join),
            (round_module, "verify", self._verify_rows),
            (acceptance, "best", partial(self._see, "chosen")),
            (acceptance, "probs", partial(self._see, "p")),
            (acceptance, "resolve", self._resolve),
        ]

    def _capture(
        self,
        original: Original,
        function: Function,
        _: Backend,
        device: torch.device,
        *more: object,
    ) -> Graph:
        self._paused = True  # nothing may be read, and no row runs
        try:
            graph: Graph = original(function, "eager", device)
            return graph
        finally:
            self._paused = False

    def _join(
        self, original: Original, rows: Rows, row: int, runner: RequestRunner
    ) -> Prefill[int]:
        request = self._of(runner)
        request.captured = True
        self._rows.setdefault(rows.state, {})[row] = request
        prefill: Prefill[int] = original(rows, row, runner)
        return prefill

    def _run_round(
        self, original: Original, state: RowState, drafting: Drafting, verifier: str, end: int
    ) -> None:
        active = state.counter("active").tolist()
        requests = self._rows.get(state, {})
        self._running = {row: one for row, one in requests.items() if active[row]}
        for row, request in self._running.items():
            self._prepare(request, RowDrafts(state, drafting, end, row, request))
        self._forget()
        self._chains = drafting.chains
        original(state, drafting, verifier, end)

    # ---- what a round computes ----

    def _draw_draft(self, original: Original, weights: Tensor, u_BR: Tensor) -> Tensor:
        self._drawn.append(u_BR.clone())
        tokens_BR: Tensor = self._note_numbers(original, weights, u_BR)
        return tokens_BR

    def _see(self, what: str, original: Original, *args: object, **options: object) -> Tensor:
        result: Tensor = original(*args, **options)
        self._seen[what] = result.clone()
        return result

    def _resolve(
        self, original: Original, outcomes: Outcomes, p_BMV: Tensor, u_B2: Tensor
    ) -> Verdict:
        self._seen["u"], used = u_B2.clone(), len(self.used)
        verdict: Verdict = original(outcomes, p_BMV, u_B2)
        del self.used[used:]  # noted by row: without drafts the token is the target's own
        return verdict

    def _verify_rows(
        self,
        original: Original,
        state: RowState,
        verifier: str,
        draft: Draft,
        logits_BMV: Tensor,
        see_BMM: Tensor,
    ) -> Path:
        given_BMV = logits_BMV.clone()  # overwritten
        path: Path = original(state, verifier, draft, logits_BMV, see_BMM)
        seen = self._seen
        for row, request in self._running.items():
            proposal = proposal_of(draft, row, self._chains, request)
            generator = request.runner.request.generator
            nodes = [0, *(i + 1 for i in _live(draft, row))]
            own = (given_BMV[row, nodes], proposal, verifier, state.sampling)
            round = Round(*own, ProcessorState(), generator)
            text = state.text_BS[row, : int(state.counter("length")[row]) + 1].tolist()
            numbers = [self._draft_numbers(row, proposal)]
            made = RecordedRound(request, text, round, numbers)
            if "p" in seen:
                made.received = dict(enumerate(seen["p"][row, nodes]))
            else:
                made.chosen = dict(enumerate(seen["chosen"][row, nodes].tolist()))
            if "u" in seen and round.by_rule:
                made.verifying = [seen["u"][row]]
                self.used += made.verifying
            on_path = see_BMM[row, path.end_B[row]].nonzero()[:, 0].tolist()
            places = [nodes.index(node) - 1 for node in on_path if node and node in nodes]
            accepted = proposal.tokens_K[places].tolist()
            made.end = Outcome(accepted, int(path.next_B[row]), places)
            request.rounds.append(made)
            self.rounds.append(made)
        return path

    def _draft_numbers(self, row: int, proposal: Proposal) -> Tensor:
        """The random numbers that decided the drafts that count, as they were drawn."""
        certain = proposal.q is not None and bool((proposal.q.probs.amax(1) == 1).all())
        copied = certain and proposal.parents is None  # or drawn, whatever the numbers are
        if not self._drawn or copied:
            return torch.zeros(0, dtype=torch.float64)
        u_R = torch.cat([u_BR[row] for u_BR in self._drawn])
        return u_R[u_R >= 0]


def _live(draft: Draft, row: int) -> list[int]:
    """The drafts of a row that count."""
    return draft.live_BN[row].nonzero()[:, 0].tolist()


def proposal_of(draft: Draft, row: int, chains: bool, request: RecordedRequest) -> Proposal:
    """The drafts of one row."""
    live, drafter = _live(draft, row), request.runner.drafter
    if not live or drafter is None:
        return NO_DRAFTS
    tokens_K = draft.tokens_BN[row, live]
    above = draft.above_BN[row, live].tolist()
    parents = None
    if not chains:
        places = {0: -1, **{i + 1: place for place, i in enumerate(live)}}
        parents = tuple(places[i] for i in above)
    if draft.q_BNV is None:
        return Proposal(tokens_K, "point", parents=parents)
    siblings: Siblings | None = None
    if parents is not None and len(set(parents)) < len(parents):
        siblings = "without_replacement" if draft.without_replacement else "iid"
    law, q = drafter.law(request.asked.sampling), DraftProbs(draft.q_BNV[row, live])
    steps_K = None if draft.steps_BN is None else draft.steps_BN[row, live]
    return Proposal(tokens_K, law, q, steps_K, parents, siblings, state_only=law == "unmasked")


class RowDrafts(DraftSource):
    """What a row would draft now; the other rows do not draft."""

    def __init__(
        self, state: RowState, drafting: Drafting, end: int, row: int, request: RecordedRequest
    ) -> None:
        super().__init__(request.runner, state, int(state.room_B[row]) if drafting.nodes else 0)
        self.state, self.drafting, self.end, self.row = state, drafting, end, row
        self.request = request
        parts: list[Any] = [state, drafting]
        while parts[-1] is not None:
            parts.append(getattr(parts[-1], "inner", None) or getattr(parts[-1], "context", None))
        held = [x for part in parts[:-1] for x in vars(part).values() if isinstance(x, Tensor)]
        self._counters = [(x, x.clone()) for x in held if x.dtype == torch.int64]

    def propose(self, levels: int) -> Proposal | None:
        self.rewind()
        state, row = self.state, self.row
        state.counter("active").zero_()[row] = 1
        state.counter("limit")[row] = state.counter("written")[row] + 1 + levels
        draft = self.drafting.draft(state, self.end)
        found = proposal_of(draft, row, self.drafting.chains, self.request)
        return found if len(found) else None

    def rewind(self) -> None:
        for now, before in self._counters:
            now.copy_(before)
