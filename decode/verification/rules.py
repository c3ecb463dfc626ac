"""Check 3: the verifying functions themselves, over every draft of small tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.speculation import verifiers
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings
from decode.speculation.rules import fall_back_to_p
from decode.speculation.tree import chain, depths
from decode.speculation.verifiers import VERIFIERS, run_verifier
from decode.verification.enumeration import (
    DRAFTERS,
    EXACT,
    KINDS,
    Parents,
    RuleCase,
    Toy,
    chains_only,
    distance,
    outcomes,
    pairs,
)
from decode.verification.reference import interval
from decode.verification.verdict import Tally

CHAINS = ((-1,), chain(2), chain(3))
TREES = ((-1, -1), (-1, -1, -1), (-1, 0, 0, -1), (-1, 0, -1, 0, 2), (-1, -1, 0, 0, 1))
SMALL = 4  # nodes of the trees whose draws are tried
SEEDS = 3
WIDE, APART = 1100, 275
"""A vocabulary over which the tokens of a table are spread: kernels sum it in blocks."""
DRAWN = 4  # of each case, drafts whose draws are tried
AWAY = 1e-4  # how far from the border of two outcomes the numbers lie that decide between them


def check_rules(
    tally: Tally, seeds: int = SEEDS, names: Collection[str] = tuple(VERIFIERS)
) -> None:
    """Check every exact verifier (of those named) with every kind of drafts that it accepts."""
    for verifier, drafter in pairs():
        if verifier not in names:
            continue
        greedy, chains = VERIFIERS[verifier].greedy_only, chains_only(verifier, drafter)
        where = f"{verifier} over drafts {drafter!r}"
        batches: dict[int, list[Draw]] = defaultdict(list)
        for parents, seed, case in _cases(drafter, greedy, chains, seeds):
            what = f"{where} of the tree {parents}, seed {seed}: the output does not follow p"
            away = distance(case, verifier)
            tally.measure("output of a rule against p, total variation", away, EXACT, what)
            if seed == 1 and len(parents) <= SMALL:
                count = len(case.weight_B)
                for place, b in enumerate(range(0, count, max(1, count // DRAWN))):
                    batches[place] += _draws(case, verifier, drafter, b, bool(place % 2))
        for draws in batches.values():
            _check_draws(verifier, where, draws, tally)
    _check_zero(tally)


@lru_cache(1)  # neighbours in `pairs` share their cases
def _cases(
    drafter: str, greedy: bool, chains: bool, seeds: int
) -> list[tuple[Parents, int, RuleCase]]:
    """Shape, seed and case."""
    found = []
    for parents in CHAINS if chains else (*CHAINS, *TREES):
        # orders differ by seed, and few of them show that a step is forgotten
        for seed in range(3 * seeds if drafter.startswith("unmasked") else seeds):
            V = 2 + (len(parents) <= SMALL)
            toy = Toy(V, max(depths(parents)), seed, greedy)
            found.append((parents, seed, DRAFTERS[drafter](toy, parents)))
    return found


class Draw(NamedTuple):
    """A proposal, p (M, V), two random numbers, and the node and token that they give."""

    proposal: Proposal
    p_MV: Tensor
    numbers: tuple[float, float]
    outcome: tuple[int, int]


def _draws(case: RuleCase, verifier: str, drafter: str, b: int, dense: bool) -> Iterator[Draw]:
    """Around every border between two outcomes of draft `b` of a case, over a wide vocabulary;
    `dense`: with q over all of it."""
    law, _, siblings = drafter.partition(", ")
    drafts, parents = case.drafts, case.drafts.parents[b]
    count = len(parents)
    ids, q = APART * torch.arange(case.toy.V) + 7, None
    if drafts.q_BNV is not None:  # over the tokens in another order, or over all
        q = DraftProbs(drafts.q_BNV[b, :count].float().flip(1).contiguous(), ids.flip(0))
        q = DraftProbs(q.dense(WIDE)) if dense else q
    branches = len(set(parents)) < count and law != "point"
    proposal = Proposal(
        ids[drafts.tokens_BN[b, :count]],
        cast(Law, law),
        q,
        None if drafts.steps_BN is None else drafts.steps_BN[b, :count],
        None if parents == chain(count) else parents,
        cast(Siblings, KINDS.get(siblings, "iid")) if branches else None,
        law == "unmasked",
    )
    out, p_MV = outcomes(case, verifier), case.p_BMV[b, : count + 1]
    rest_MV = fall_back_to_p(out.rest_BMV[b, : count + 1], p_MV)
    wide_MV = torch.zeros(count + 1, WIDE).index_copy_(1, ids, p_MV.float())
    for node in range(count + 1):
        for u in _within(interval(out.stop_BM[b, : count + 1], node)):
            for token in range(case.toy.V):
                for v in _within(interval(rest_MV[node], token)):
                    yield Draw(proposal, wide_MV, (u, v), (node, int(ids[token])))


def _within(bounds: tuple[float, float]) -> tuple[float, ...]:
    """Numbers just inside an interval; none where it is too narrow."""
    low, high = bounds
    return (low + AWAY, high - AWAY) if high - low > 4 * AWAY else ()


def _check_draws(verifier: str, where: str, draws: Sequence[Draw], tally: Tally) -> None:
    """`run_verifier`, C kernels included, over drafts of several shapes in one batch: each has the
    outcome that the rule gives it alone."""
    size = max(len(one.p_MV) for one in draws)
    p_BMV = torch.stack([F.pad(one.p_MV, (0, 0, 0, size - len(one.p_MV))) for one in draws])
    numbers = [torch.tensor(one.numbers, dtype=torch.float64) for one in draws]
    with mock.patch.object(verifiers, "uniform", side_effect=numbers):
        proposals, generators = [one.proposal for one in draws], [torch.Generator()] * len(draws)
        ends = run_verifier(verifier, proposals, p_BMV, generators)
    tally.counts["outcomes at a border"] += len(draws)
    for one, *found in zip(draws, *(end_B.tolist() for end_B in ends), strict=True):
        if tuple(found) != one.outcome:
            what = f"{where} of the tree {one.proposal.tree}: numbers {one.numbers} give node and"
            tally.find(f"{what} token {found}, not {one.outcome}")
            return


def _check_zero(tally: Tally) -> None:
    """A number of 0, the smallest there is, never accepts or draws a token of probability 0."""
    p_1MV = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    proposal = Proposal(torch.tensor([1]), "independent", DraftProbs(torch.tensor([[0.5, 0.5]])))
    for name, one in VERIFIERS.items():
        if one.rule is None or one.greedy_only or one.lossy:
            continue
        with mock.patch.object(verifiers, "uniform", lambda n, _: torch.zeros(n).double()):
            end_1, next_1 = run_verifier(name, [proposal], p_1MV, [torch.Generator()])
        right = end_1.tolist() == [0] and next_1.tolist() == [0]
        tally.expect("tokens of probability 0", right, f"{name} produced a token of probability 0")
