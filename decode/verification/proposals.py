"""Check 2: all proposals that a request may draft, enumerated. In place of each random draw every
token that it may give is tried. Verified by ratio under random tables of p, all proposals together
have to give exactly p: they do if each drafted token follows the q that is reported with it. And
the draws of recorded rounds, whatever their options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.engine.engine import RequestRunner
from decode.speculation import sampling, verification, verifiers
from decode.speculation.drafts import Drafts, normalise
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.rules import Outcomes, fall_back_to_p
from decode.speculation.tree import path_to
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
        return torch.stack([self._choose(row_V) for row_V in rows]).reshape(weights.shape[:-1])

    def _choose(self, row_V: Tensor) -> Tensor:
        support = row_V.nonzero()[:, 0]
        if not len(support):  # nothing is left to draw: any token, which no verifier accepts
            return torch.zeros_like(row_V[0], dtype=torch.int64)
        if self.place == len(self.script):
            self.script.append(0)
        if self.script[self.place] >= len(support):
            raise Unsteady
        token = support[self.script[self.place]]
        self.widths.append(len(support))
        self.place += 1
        self.weight *= float(row_V[token] / row_V.sum())
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
            for module in (sampling, verification, verifiers):
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


def random_rows(count: int, V: int, generator: torch.Generator) -> Tensor:
    """Random distributions, (count, V) fp64, sharp and flat, some entries exactly zero."""
    weights = torch.rand(count, V, dtype=torch.float64, generator=generator) ** 3 + 1e-3
    weights[torch.rand(count, V, generator=generator) < 0.3] = 0
    weights[weights.sum(1) == 0, 0] = 1
    return normalise(weights)


class TargetTables:
    """Random p after every prefix of up to K tokens: `p[d][prefix]` is the row after d tokens.
    `greedy`: one-hot rows."""

    def __init__(self, V: int, K: int, seed: int, greedy: bool = False) -> None:
        self.V = V
        generator = torch.Generator().manual_seed(seed)
        self.p = [random_rows(V**d, V, generator).view((V,) * (d + 1)) for d in range(K + 1)]
        if greedy:
            self.p = [F.one_hot(p.argmax(-1), V).double() for p in self.p]
        self.joint = self.continued(torch.ones((), dtype=torch.float64))

    def continued(self, mass: Tensor) -> Tensor:
        """The joint law of K + 1 tokens whose first ones have the law `mass`, (V,) * d."""
        for p in self.p[mass.dim() :]:
            mass = mass[..., None] * p
        return mass

    def rows(self, proposal: Proposal) -> Tensor:
        """p at the root and after every node, (M, V)."""
        return torch.stack([self.p[len(path)][path] for path in paths_of(proposal)])

    def outcomes(self, verifier: str, proposals: Sequence[Proposal]) -> tuple[Outcomes, Tensor]:
        """What a verifier's rule makes of proposals in one batch, and p (B, M, V)."""
        rule, size = verifiers.find(verifier).rule, max(len(x) for x in proposals)
        assert rule is not None
        p_BMV = torch.stack([F.pad(self.rows(x), (0, 0, 0, size - len(x))) for x in proposals])
        return rule(p_BMV.clone(), Drafts.of(proposals, self.V)), p_BMV

    def distance(self, verifier: str, proposals: Weighted[Proposal], other: float = 0) -> float:
        """Total variation between p and the joint law that all proposals give. `other`:
        the probability that nothing is drafted by chance, and p itself comes out."""
        out, p_BMV = self.outcomes(verifier, [x for _, x in proposals])
        next_BMV = normalise(fall_back_to_p(out.rest_BMV, p_BMV)) * out.stop_BM[..., None]
        laws = [torch.zeros_like(p) for p in self.p]
        for (weight, proposal), next_MV in zip(proposals, next_BMV, strict=True):
            for path, next_V in zip(paths_of(proposal), next_MV, strict=False):
                laws[len(path)][path] += weight * next_V
        law = sum((self.continued(law) for law in laws), other * self.joint)
        return float((law - self.joint).abs().sum()) / 2


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    """The drafted tokens up to the root, and up to every node."""
    tokens, tree = proposal.tokens_K.tolist(), proposal.tree
    return [tuple(tokens[i] for i in path_to(tree, node)) for node in range(len(tokens) + 1)]


def check_proposals(runner: RequestRunner, tally: Tally, name: str) -> None:
    """Enumerate what a request, which is then given up, would draft now, at a small top-k."""
    tally.place = {"method": name}
    session, request, drafter = runner.session, runner.request, runner.drafter
    sampling, room = request.sampling, min(LEVELS, runner.limit - len(runner.out.tokens) - 1)
    if session is None or drafter is None or room < 1:
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

    numbers, states, part = runner.request.generator.get_state(), [], runner.session
    while part is not None and hasattr(part, "__dict__"):
        states.append((part, dict(vars(part))))
        part = getattr(part, "inner", None)

    def restore() -> None:
        runner.request.generator.set_state(numbers)
        for session, fields in states:
            vars(session).clear()
            vars(session).update(fields)

    return restore


def judge(outcomes: Weighted[Proposal | None], tally: Tally, name: str) -> None:
    """What the rules make of all proposals together follows p, under random tables of p."""
    tally.counts["proposals enumerated"] += len(outcomes)
    drawn = [(weight, x) for weight, x in outcomes if x is not None and x.q is not None]
    if not drawn:
        return
    ids_V = torch.cat([x.tokens_K for _, x in drawn]).unique()
    few = [(weight, _over(x, ids_V)) for weight, x in drawn]
    verifier = "hybrid" if drawn[0][1].law == "unmasked" else "traversal"
    for seed in range(1, TABLES + 1):
        tables = TargetTables(1 + len(ids_V), max(x.depth for _, x in drawn), seed)
        away = tables.distance(verifier, few, 1 - sum(weight for weight, _ in drawn))
        what = f"{name}: its drafts do not follow their q, so the output does not follow p"
        if not tally.measure("output of all proposals, total variation", away, EXACT, what):
            return


def _over(proposal: Proposal, ids_V: Tensor) -> Proposal:
    """The proposal over these tokens, and all others as one."""
    assert proposal.q is not None
    own = proposal.q.ids
    q_KV = proposal.q.dense(1 + int(torch.cat([ids_V] if own is None else [ids_V, own]).max()))
    few_KV = q_KV[:, ids_V].double().cpu()
    rest_K1 = 1 - few_KV.sum(1, keepdim=True)
    q = DraftProbs(torch.cat((few_KV, rest_K1.masked_fill(rest_K1 < EXACT, 0.0)), 1))
    tokens_K = torch.searchsorted(ids_V, proposal.tokens_K).cpu()
    return replace(proposal, tokens_K=tokens_K, q=q)


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
