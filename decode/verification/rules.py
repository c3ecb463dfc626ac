"""Check 3: the verifying function itself, over every draft of small tables, random ones and ones
cut out of recorded rounds."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.speculation import verifiers
from decode.speculation.drafts import Drafts, normalise
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
from decode.verification.recorded import RecordedRound
from decode.verification.reference import interval
from decode.verification.verdict import Tally
from specalign.kernels import choice

CHAINS = ((-1,), *map(chain, (2, 3, 4, 5, 7)))
TREES = (
    (-1, -1), (-1, -1, -1), (-1, -1, -1, -1), (-1, 0, 0, -1), (-1, 0, -1, 0, 2), (-1, -1, 0, 0, 1),
)  # fmt: skip
SMALL, MEDIUM, LARGE = 4, 5, 8
"""Nodes of drafts over three tokens or more (larger ones: two), of those whose draws are tried, and of
recorded drafts whose shapes are enumerated."""
SHAPES = 4  # recorded shapes, the most frequent ones
SEEDS = 3
TOKENS = 4  # tokens that are left of a recorded distribution
WIDE, PLACES = 1100, (7, 511, 512, 1024, 1099)
"""A vocabulary, and where in it the tokens of a table are: kernels sum it in blocks of 512."""
DRAWN = 3  # of each case, drafts whose draws are tried
AWAY = 1e-4  # how far from the border of two outcomes the numbers lie that decide between them
Pool = tuple[Tensor, Tensor] | None


def pool_of(rounds: Sequence[RecordedRound]) -> Pool:
    """Rows of p and q of recorded rounds over the tokens likeliest under either, normalised; None
    without rounds that have a q."""
    found = []
    for one in rounds:
        if one.proposal.q is None or not one.by_rule:
            continue
        for i, parent in enumerate(one.proposal.tree):
            p_V = one.received[parent + 1].double().cpu()
            q_V = one.proposal.q.take(slice(i, i + 1)).dense(len(p_V))[0].double().cpu()
            ids = torch.maximum(p_V, q_V).topk(TOKENS).indices
            pair_2S = torch.stack((p_V[ids], q_V[ids]))
            if float(pair_2S.sum(1).min()) > 0:
                found.append(normalise(pair_2S))
    if not found:
        return None
    p_RS, q_RS = torch.stack(found).unbind(1)
    return p_RS, q_RS


def check_rules(
    tally: Tally,
    rounds: Sequence[RecordedRound] = (),
    seeds: int = SEEDS,
    names: Collection[str] = tuple(VERIFIERS),
) -> None:
    """Check every exact verifier (of those named) with every kind of drafts that it accepts."""
    pool = pool_of(rounds)
    counts = Counter(one.proposal.tree for one in rounds if 0 < len(one.proposal) <= LARGE)
    shapes = tuple(tree for tree, _ in counts.most_common(SHAPES))
    for verifier, drafter in pairs():
        if verifier not in names:
            continue
        greedy, chains = VERIFIERS[verifier].greedy_only, chains_only(verifier, drafter)
        several: list[tuple[Proposal, Tensor]] = []
        for parents, seed, case in _cases(drafter, greedy, chains, seeds, pool, shapes):
            where = f"{verifier} over drafts {drafter!r} of the tree {parents}"
            what = f"{where}, seed {seed}: the output does not follow p"
            away = distance(case, verifier)
            tally.measure("output of a rule against p, total variation", away, EXACT, what)
            if seed == 1 and len(parents) <= MEDIUM and not greedy:
                _check_draws(case, verifier, drafter, where, tally)
            V = case.toy.V
            if seed != 1 or len(parents) > SMALL or any(p.shape[1] != V for _, p in several):
                continue
            for b in range(0, len(case.weight_B), max(1, len(case.weight_B) // 3)):
                p_MV = case.p_BMV[b, : len(case.drafts.parents[b]) + 1]
                several.append((_proposal(case, drafter, b), p_MV))
        _check_together(verifier, drafter, several, tally)


@lru_cache(1)  # neighbours in `pairs` share their cases
def _cases(
    drafter: str, greedy: bool, chains: bool, seeds: int, pool: Pool, shapes: tuple[Parents, ...]
) -> list[tuple[Parents, int, RuleCase]]:
    """Shape, seed and case: random tables, and every second time rows of `pool`. shapes: of
    recorded drafts."""
    found = []
    each = dict.fromkeys((*CHAINS, *TREES, *shapes))
    for parents in [x for x in each if not chains or x == chain(len(x))]:
        # orders differ by seed, and few of them show that a step is forgotten
        for seed in range(3 * seeds if drafter.startswith("unmasked") else seeds):
            small = len(parents) <= SMALL
            # q of recorded rounds is one row for a position, so i.i.d. siblings share it
            own = pool if seed % 2 and not greedy and small else None
            V = max(2 + small, 1 + max(Counter(parents).values())) if own is None else TOKENS
            toy = Toy(V, max(depths(parents)), seed, greedy, own)
            found.append((parents, seed, DRAFTERS[drafter](toy, parents)))
    return found


def _proposal(case: RuleCase, drafter: str, b: int) -> Proposal:
    """One draft of a case."""
    law, _, siblings = drafter.partition(", ")
    drafts, parents = case.drafts, case.drafts.parents[b]
    count = len(parents)
    branches = len(set(parents)) < count and law != "point"
    kind = cast(Siblings, KINDS.get(siblings, "iid")) if branches else None
    q = None if drafts.q_BNV is None else DraftProbs(drafts.q_BNV[b, :count])
    steps_K = None if drafts.steps_BN is None else drafts.steps_BN[b, :count]
    shape = None if parents == chain(count) else parents
    tokens_K = drafts.tokens_BN[b, :count]
    return Proposal(tokens_K, cast(Law, law), q, steps_K, shape, kind, law == "unmasked")


def _check_together(
    verifier: str, drafter: str, several: Sequence[tuple[Proposal, Tensor]], tally: Tally
) -> None:
    """Drafts of several shapes have the outcomes in one batch that they have alone."""
    rule, size = VERIFIERS[verifier].rule, max(len(p_MV) for _, p_MV in several)
    V = several[0][1].shape[1]
    assert rule is not None
    p_BMV = torch.stack([F.pad(p_MV, (0, 0, 0, size - len(p_MV))) for _, p_MV in several])
    out = rule(p_BMV.clone(), Drafts.of([proposal for proposal, _ in several], V))
    for b, (proposal, p_MV) in enumerate(several):
        alone, rows = rule(p_MV[None].clone(), Drafts.of([proposal], V)), len(p_MV)
        stop_M, rest_MV = alone.stop_BM[0], normalise(fall_back_to_p(alone.rest_BMV[0], p_MV))
        away_M = (out.stop_BM[b, :rows] - stop_M).abs()
        away_MV = (normalise(fall_back_to_p(out.rest_BMV[b, :rows], p_MV)) - rest_MV).abs()
        away = max(float(away_M.max()), float((away_MV * (stop_M > EXACT)[:, None]).max()))
        what = f"{verifier} over drafts {drafter!r}: different outcome in a batch ({proposal.tree})"
        name = "outcomes in a mixed batch and alone"
        if not tally.measure(name, away, EXACT, what):
            return


def _check_draws(case: RuleCase, verifier: str, drafter: str, where: str, tally: Tally) -> None:
    """`run_verifier`, C kernels included, at numbers around every border between two outcomes of
    the rule."""
    ids = torch.tensor(PLACES[: case.toy.V])
    p_BMV = torch.zeros(*case.p_BMV.shape[:2], WIDE).index_copy_(2, ids, case.p_BMV.float())
    out = outcomes(case, verifier)
    count = len(case.weight_B)
    for place, b in enumerate(range(0, count, max(1, count // DRAWN))):
        proposal = _proposal(case, drafter, b)
        rows, q = len(proposal) + 1, proposal.q
        if q is not None:  # over the tokens in another order, then over all
            q = DraftProbs(q.probs.float().flip(1).contiguous(), ids.flip(0))
            q = DraftProbs(q.dense(WIDE)) if place % 2 else q
        proposal = replace(proposal, tokens_K=ids[proposal.tokens_K], q=q)
        rest_MV = fall_back_to_p(out.rest_BMV[b, :rows], case.p_BMV[b, :rows])
        tried = list(_near_borders(out.stop_BM[b, :rows], rest_MV))
        wanted = [(node, int(ids[token])) for _, _, node, token in tried]
        numbers = [torch.tensor(one[:2], dtype=torch.float64) for one in tried]
        p_TMV = p_BMV[b : b + 1, :rows].repeat(len(tried), 1, 1)
        generators = [torch.Generator()] * len(tried)
        with mock.patch.object(verifiers, "uniform", side_effect=numbers):
            ends = run_verifier(verifier, [proposal] * len(tried), p_TMV, generators)
        found = list(zip(*(one_T.tolist() for one_T in ends), strict=True))
        in_c = verifier in ("block", "traversal") and proposal.parents is None and q is not None
        kernel = ", C kernel" if in_c and choice.takes(p_TMV) else ""
        tally.counts[f"outcomes at a border{kernel}"] += len(tried)
        if found != wanted:
            at = next(i for i, pair in enumerate(found) if pair != wanted[i])
            ended = f"node and token {found[at]}, not {wanted[at]}"
            tally.find(f"{where}: numbers {tried[at][:2]} give {ended}")
            return


def _near_borders(stop_M: Tensor, rest_MV: Tensor) -> Iterator[tuple[float, float, int, int]]:
    """Two numbers, and the node and token that they give: just inside of every outcome, and 0 for
    the first one."""
    for node in range(len(stop_M)):
        for u in _within(interval(stop_M, node), node == 0):
            for token in range(rest_MV.shape[1]):
                for v in _within(interval(rest_MV[node], token), token == 0):
                    yield u, v, node, token


def _within(bounds: tuple[float, float], first: bool) -> tuple[float, ...]:
    """Numbers just inside an interval; none where it is too narrow. first: it begins at 0, the
    smallest number there is."""
    low, high = bounds
    if high - low <= 4 * AWAY:
        return ()
    return 0.0 if first else low + AWAY, high - AWAY
