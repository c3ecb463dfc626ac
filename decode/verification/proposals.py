"""Check 2: the random draws of a proposal, enumerated. In place of each draw every token that it
may give is tried, so that the probability of every proposal is known exactly. Verified by ratio
under random tables of p, all proposals together then have to give exactly p: they do if each
drafted token follows the q that is reported with it. And the draws of recorded rounds, whatever
their options."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from decode.engine.engine import RequestRunner
from decode.proposers.suffix_automaton import TextAutomaton
from decode.speculation import sampling as sampling_module
from decode.speculation import verification, verifiers
from decode.speculation.drafts import Drafts
from decode.speculation.proposal import DraftProbs, Proposal
from decode.verification.enumeration import RuleCase, Toy, output_law
from decode.verification.recording import Recorder
from decode.verification.reference import NEAR, interval, is_inside
from decode.verification.requests import drafts_so
from decode.verification.verdict import Tally

Result = TypeVar("Result")
Weighted = list[tuple[float, Result]]  # results with their probabilities
EXACT = 1e-5
MOST_OUTCOMES = 128
FEW, SIBLINGS = 2, 3  # top-k of enumerated proposals, and of those of one level, all siblings
LEVELS = 3  # draft tokens along a path of an enumerated proposal
TABLES = 3  # random tables of p


class Unsteady(Exception):
    """Another run than the last one: it cannot be enumerated."""


class Choices:
    """Replaces `draw_at` by the next choice of a script; beyond the script, by the first token of
    each row."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.place = script, 0
        self.weight = 1.0
        self.widths: list[int] = []

    def draw_at(self, weights: Tensor, u: Tensor) -> Tensor:
        rows = weights.reshape(-1, weights.shape[-1]).double()
        found = [self._choose(row_V) for row_V in rows / rows.sum(-1, keepdim=True)]
        return torch.stack(found).reshape(weights.shape[:-1])

    def _choose(self, row_V: Tensor) -> Tensor:
        support = row_V.nonzero()[:, 0]
        if self.place == len(self.script):
            self.script.append(0)
        if self.script[self.place] >= len(support):
            raise Unsteady
        token = support[self.script[self.place]]
        self.widths.append(len(support))
        self.place += 1
        self.weight *= float(row_V[token])
        return token


def every_outcome(
    run: Callable[[], Result], most: int, even: bool = False
) -> Weighted[Result] | None:
    """(probability, result) of a function for everything that its draws may give; None if there are
    more than `most`. `even`: every run draws equally often, so the first one shows how many."""
    found: Weighted[Result] = []
    script: list[int] = []
    while True:
        choices = Choices(script)
        with ExitStack() as stack:
            for module in (sampling_module, verification, verifiers):
                stack.enter_context(mock.patch.object(module, "draw_at", choices.draw_at))
            stack.enter_context(mock.patch.object(verifiers, "_chains_in_c", lambda *_: None))
            try:
                result = run()
            except Unsteady:
                return None
        found.append((choices.weight, result))
        if len(found) > most or (even and math.prod(choices.widths) > most):
            return None
        del script[choices.place :]
        while script and script[-1] + 1 == choices.widths[len(script) - 1]:
            script.pop()
        if not script:
            return found
        script[-1] += 1


def check_proposals(runner: RequestRunner, tally: Tally, name: str) -> None:
    """Enumerate what a request, which is then given up, would draft now, at a small top-k."""
    tally.place = {"method": name}
    session, request, drafter = runner.session, runner.request, runner.drafter
    sampling, room = request.sampling, min(LEVELS, runner.limit - len(runner.out.tokens) - 1)
    if session is None or drafter is None or room < 1 or sampling.greedy or request.noise:
        return
    restore = _snapshot(runner)

    def propose(levels: int) -> Proposal | None:
        restore()
        return session.propose(min(levels, drafter.draft_tokens))

    for top_k, most in ((FEW, room), (SIBLINGS, 1)):
        request.sampling = replace(sampling, top_k=top_k)
        runs = (partial(propose, levels) for levels in range(most, 0, -1))
        tried = (every_outcome(run, MOST_OUTCOMES, even=True) for run in runs)
        outcomes = next((found for found in tried if found is not None), None)
        if outcomes is None:
            tally.counts["proposals with too many outcomes"] += top_k == FEW
            return
        judge(outcomes, tally, name)
        if not any(proposal is not None and proposal.siblings for _, proposal in outcomes):
            return


def _snapshot(runner: RequestRunner) -> Callable[[], None]:
    """A function that puts a request's session, those that it wraps, and its random numbers back
    into their present state."""

    def copy(fields: dict[str, object]) -> dict[str, object]:
        """Automata are changed in place, anything else is replaced."""
        return {k: deepcopy(v) if isinstance(v, TextAutomaton) else v for k, v in fields.items()}

    numbers, states, part = runner.request.generator.get_state(), [], runner.session
    while part is not None and hasattr(part, "__dict__"):
        states.append((part, copy(vars(part))))
        part = getattr(part, "inner", None)

    def restore() -> None:
        runner.request.generator.set_state(numbers)
        for session, fields in states:
            vars(session).clear()
            vars(session).update(copy(fields))

    return restore


def judge(outcomes: Weighted[Proposal | None], tally: Tally, name: str) -> None:
    """What the rules make of all proposals together follows p, under random tables of p."""
    tally.counts["proposals enumerated"] += len(outcomes)
    drawn = [(weight, x) for weight, x in outcomes if x is not None and x.q is not None]
    if not drawn:
        return
    ids_V = torch.cat([_ids_of(x) for _, x in drawn]).unique()
    groups: dict[Any, Weighted[Proposal]] = defaultdict(list)
    for weight, x in drawn:
        groups[x.tree, x.law, x.siblings].append((weight, x))
    chosen = sum(weight for weight, _ in outcomes) - sum(weight for weight, _ in drawn)
    for seed in range(1, TABLES + 1):
        toy = Toy(len(ids_V), max(x.depth for _, x in drawn), seed)
        law = chosen * toy.joint
        for (_, kind, _), group in groups.items():
            verifier = "hybrid" if kind == "unmasked" else "traversal"
            law = law + output_law(_case_of(group, ids_V, toy), verifier)
        away = float((law - toy.joint).abs().sum()) / 2
        what = f"{name}: its drafts do not follow their q, so the output does not follow p"
        if not tally.measure("output of all proposals, total variation", away, EXACT, what):
            return


def _ids_of(proposal: Proposal) -> Tensor:
    """The tokens that a proposal may have."""
    assert proposal.q is not None
    columns = proposal.q.probs.amax(0).nonzero()[:, 0]
    ids = columns if proposal.q.ids is None else proposal.q.ids[columns]
    return torch.cat((ids, proposal.tokens_K)).cpu()


def _case_of(group: Weighted[Proposal], ids_V: Tensor, toy: Toy) -> RuleCase:
    """Proposals of one tree and law, over these tokens alone."""
    own = []
    for _, x in group:
        assert x.q is not None
        size = 1 + max(int(ids_V.max()), 0 if x.q.ids is None else int(x.q.ids.max()))
        q = DraftProbs(x.q.dense(size).cpu()[:, ids_V].double())
        own.append(replace(x, tokens_K=torch.searchsorted(ids_V, x.tokens_K.cpu()), q=q))
    drafts = Drafts.of(own, len(ids_V))
    weight_B = torch.tensor([weight for weight, _ in group], dtype=torch.float64)
    return RuleCase(weight_B, drafts, toy.p_BMV(drafts.tokens_BN, own[0].tree), toy)


def check_drafts(recorder: Recorder, tally: Tally) -> None:
    """Every drafted token is the one that its reported q and a random number used for nothing else
    determine, whatever the options."""
    for one in recorder.rounds:
        tally.place = one.place
        if one.proposal.q is not None and not drafts_so(one.request.runner.drafter, "in_rounds"):
            _check_drawn(one.proposal, one.drafting, tally)


def _check_drawn(proposal: Proposal, numbers: Sequence[Tensor], tally: Tally) -> None:
    assert proposal.q is not None
    u_K = [u for x in numbers if x.is_floating_point() for u in x.flatten().tolist()]
    if not u_K and bool((proposal.q.probs.amax(1) == 1).all()):  # copies
        return
    if len(u_K) != len(proposal):
        tally.find(f"{len(proposal)} drafts used {len(u_K)} random numbers: each needs one")
        return
    columns_K, ids = proposal.tokens_K, proposal.q.ids
    if ids is not None:
        columns_K = (ids == columns_K[:, None]).long().argmax(1)
    bounds = []
    for k, parent in enumerate(proposal.tree):
        left_S = proposal.q.probs[k].clone()
        if proposal.siblings == "without_replacement":
            left_S[columns_K[[j for j in range(k) if proposal.tree[j] == parent]]] = 0
        # where nothing is left any number draws any token
        some = float(left_S.sum()) > 0
        bounds.append(interval(left_S, int(columns_K[k])) if some else (0.0, 1.0))
    if proposal.parents is not None or proposal.law == "unmasked":
        u_K = _match(bounds, u_K)  # drawn in another order than they stand
    for k, u in enumerate(u_K):
        what = f"draft {k + 1} does not follow from its q and random number"
        tally.expect("drafts recomputed from q and random number", is_inside(bounds[k], u), what)


def _match(bounds: Sequence[tuple[float, float]], numbers: Sequence[float]) -> list[float]:
    """The numbers in the order of the intervals that they lie in, each in one; -1 where none is
    left for an interval."""
    free, found = sorted(numbers), [-1.0] * len(bounds)
    for k in sorted(range(len(bounds)), key=lambda k: bounds[k][1]):
        at = next((u for u in free if bounds[k][0] - NEAR <= u <= bounds[k][1] + NEAR), None)
        if at is not None:
            free.remove(at)
            found[k] = at
    return found
