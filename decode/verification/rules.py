"""Check 3: the verifying function itself, over every draft of small tables, random ones and ones
cut out of recorded rounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.speculation import verification, verifiers
from decode.speculation.drafts import Drafts, normalise
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings
from decode.speculation.rules import or_p
from decode.speculation.sampling import NOTHING, Sampling
from decode.speculation.tree import chain, depths, path_to
from decode.speculation.verification import Round, verify_rounds
from decode.speculation.verifiers import VERIFIERS, run_verifier
from decode.verification.enumeration import (
    DRAFTERS,
    EXACT,
    KINDS,
    Case,
    Toy,
    distance,
    every,
    outcomes,
    pairs,
)
from decode.verification.recording import RecordedRound
from decode.verification.reference import interval, noise
from decode.verification.tally import Tally
from specalign.kernels import choice

SHAPES = (
    (-1,),
    chain(2),
    chain(3),
    (-1, -1),
    (-1, -1, -1),
    (-1, 0, 0, -1),
    (-1, 0, -1, 0, 2),
    (-1, -1, 0, 0, 1),
)
SEEDS = 3
TOKENS = 4
"""Tokens that are left of a recorded distribution."""
WIDE = 1100
"""Tokens of the vocabulary over which those of a table are spread: kernels sum it in several
blocks."""
AWAY = 1e-4
"""How far from the border of two outcomes the numbers lie that decide between them."""


def pool_of(rounds: Sequence[RecordedRound], tokens: int = TOKENS) -> tuple[Tensor, Tensor] | None:
    """Rows of p and q of recorded rounds over the tokens likeliest under either, normalised; None
    without rounds that have a q."""
    p_rows, q_rows = [], []
    for one in rounds:
        if one.proposal.q is None or not one.by_rule:
            continue
        for i, parent in enumerate(one.proposal.tree):
            p_V = one.received[parent + 1].double().cpu()
            q_V = one.proposal.q.take(slice(i, i + 1)).dense(len(p_V))[0].double().cpu()
            ids = torch.maximum(p_V, q_V).topk(tokens).indices
            if float(p_V[ids].sum()) > 0 and float(q_V[ids].sum()) > 0:
                p_rows.append(p_V[ids] / p_V[ids].sum())
                q_rows.append(q_V[ids] / q_V[ids].sum())
        if len(p_rows) > 200:
            break
    return (torch.stack(p_rows), torch.stack(q_rows)) if p_rows else None


def check_rules(
    tally: Tally,
    rounds: Sequence[RecordedRound] = (),
    seeds: int = SEEDS,
    names: Collection[str] = tuple(VERIFIERS),
) -> None:
    """Every exact verifier (of those named) with every kind of drafts that it may have."""
    pool = pool_of(rounds)
    for verifier, drafter in pairs():
        if verifier not in names:
            continue
        together: list[tuple[Proposal, Tensor]] = []
        chains = (
            not VERIFIERS[verifier].siblings
            or drafter.startswith("unmasked")
            or "stopped" in drafter
        )
        greedy = VERIFIERS[verifier].greedy_only
        for parents in (x for x in SHAPES if not chains or x == chain(len(x))):
            for seed in range(seeds):
                # q of recorded rounds is one row for a position, so i.i.d. siblings share it
                own = pool if seed % 2 and not greedy and len(parents) <= 4 else None
                V = TOKENS if own is not None else 3 if len(parents) < 5 else 2
                toy = Toy(V, max(depths(parents)), seed, greedy, own)
                case = DRAFTERS[drafter](toy, parents)
                away = distance(case, verifier)
                if not tally.measure("output of a rule from p, total variation", away, EXACT):
                    tally.find(
                        f"{verifier} over drafts {drafter!r} of the tree {parents}, seed {seed}: "
                        f"{away:.3g} from p (total variation)"
                    )
                if seed == 1 and verifier != "greedy" and len(parents) <= 4:
                    _check_draws(case, verifier, drafter, tally)
                if seed == 1 and len(parents) <= 4:
                    rows = range(0, len(case.weight_B), max(1, len(case.weight_B) // 3))
                    together += [
                        (
                            _proposal(case, drafter, b),
                            case.p_BMV[b, : len(case.drafts.parents[b]) + 1],
                        )
                        for b in rows
                    ]
        _check_together(verifier, drafter, together, tally)
    _check_borders(tally)
    for seed in range(seeds):
        _check_own_tokens(seed, tally)


def _proposal(case: Case, drafter: str, b: int) -> Proposal:
    """One draft of a case."""
    law, _, siblings = drafter.partition(", ")
    drafts, parents = case.drafts, case.drafts.parents[b]
    count = len(parents)
    branches = len(set(parents)) < count
    kind: Siblings | None = KINDS.get(siblings, "iid") if branches and law != "point" else None  # type: ignore[assignment]
    q = None if drafts.q_BNV is None else DraftProbs(drafts.q_BNV[b, :count])
    steps_K = None if drafts.steps_BN is None else drafts.steps_BN[b, :count]
    shape = None if parents == chain(count) else parents
    return Proposal(
        drafts.tokens_BN[b, :count], cast(Law, law), q, steps_K, shape, kind, law == "unmasked"
    )


def _check_together(
    verifier: str, drafter: str, drafts: Sequence[tuple[Proposal, Tensor]], tally: Tally
) -> None:
    """Drafts of several shapes have the outcomes in one batch that they have alone."""
    rule, size = VERIFIERS[verifier].rule, max(len(p_MV) for _, p_MV in drafts)
    V = drafts[0][1].shape[1]
    assert rule is not None
    p_BMV = torch.stack([F.pad(p_MV, (0, 0, 0, size - len(p_MV))) for _, p_MV in drafts])
    out = rule(p_BMV.clone(), Drafts.of([proposal for proposal, _ in drafts], V))
    for b, (proposal, p_MV) in enumerate(drafts):
        alone, rows = rule(p_MV[None].clone(), Drafts.of([proposal], V)), len(p_MV)
        rest_MV, its_MV = (or_p(rest, p_MV) for rest in (out.rest_BMV[b, :rows], alone.rest_BMV[0]))
        reached_M1 = alone.stop_BM[0, :, None] > EXACT
        away = max(
            float((out.stop_BM[b, :rows] - alone.stop_BM[0]).abs().max()),
            float(((normalise(rest_MV) - normalise(its_MV)).abs() * reached_M1).max()),
        )
        if not tally.measure("outcomes in a batch of several shapes and alone", away, EXACT):
            tally.find(
                f"{verifier} over drafts {drafter!r}: the tree {proposal.tree} has another outcome "
                "in a batch"
            )
            return


def _check_draws(case: Case, verifier: str, drafter: str, tally: Tally, most: int = 4) -> None:
    """`run_verifier`, C kernels included, at numbers around every border between two outcomes of
    the rule."""
    drafts = case.drafts
    ids = WIDE // TOKENS * torch.arange(case.toy.V) + 7
    p_BMV = torch.zeros(*case.p_BMV.shape[:2], WIDE).index_copy_(2, ids, case.p_BMV.float())
    out = outcomes(case, verifier)
    step = max(1, len(drafts.parents) // most)
    for b in range(0, len(drafts.parents), step):
        parents = drafts.parents[b]
        count = len(parents)
        proposal = _proposal(case, drafter, b)
        q = proposal.q
        if q is not None:  # over the tokens in another order, then over all
            pruned = DraftProbs(q.probs.float().flip(1).contiguous(), ids.flip(0))
            q = DraftProbs(pruned.dense(WIDE)) if b // step % 2 else pruned
        proposal = replace(proposal, tokens_K=ids[proposal.tokens_K], q=q)
        pairs_of_numbers: list[tuple[float, float]] = []
        wanted: list[tuple[int, int]] = []
        rest_MV = or_p(out.rest_BMV[b], case.p_BMV[b])
        for node in range(count + 1):
            for u in _within(interval(out.stop_BM[b, : count + 1], node)):
                for token in range(case.toy.V):
                    for v in _within(interval(rest_MV[node], token)):
                        pairs_of_numbers.append((u, v))
                        wanted.append((node, int(ids[token])))
        numbers = torch.tensor(pairs_of_numbers, dtype=torch.float64)
        several = [proposal] * len(wanted)
        with mock.patch.object(verifiers, "uniform", side_effect=list(numbers)):
            p_TMV = p_BMV[b : b + 1, : count + 1].repeat(len(wanted), 1, 1)
            end_T, next_T = run_verifier(
                verifier, several, p_TMV, [torch.Generator()] * len(wanted)
            )
        found = list(zip(end_T.tolist(), next_T.tolist(), strict=True))
        in_c = (
            verifier in ("block", "traversal")
            and parents == chain(count)
            and q is not None
            and choice.takes(p_TMV)
        )
        tally.counts["outcomes at a border, C kernel" if in_c else "outcomes at a border"] += len(
            wanted
        )
        if found != wanted:
            at = next(i for i, pair in enumerate(found) if pair != wanted[i])
            tally.find(
                f"{verifier} over drafts {drafter!r} of the tree {parents}: numbers "
                f"{pairs_of_numbers[at]} give node and token "
                f"{found[at]}, not {wanted[at]}"
            )
            return


def _within(bounds: tuple[float, float]) -> tuple[float, ...]:
    """Numbers just inside an interval; none where it is too narrow."""
    low, high = bounds
    return (low + AWAY, high - AWAY) if high - low > 4 * AWAY else ()


def _check_borders(tally: Tally) -> None:
    """A number of 0, the smallest there is, never accepts or draws a token of probability 0."""
    p_1MV = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    proposal = Proposal(torch.tensor([1]), "independent", DraftProbs(torch.tensor([[0.5, 0.5]])))
    for name, one in VERIFIERS.items():
        if one.rule is None or one.greedy_only or one.lossy:
            continue
        with mock.patch.object(
            verifiers, "uniform", lambda count, _: torch.zeros(count, dtype=torch.float64)
        ):
            end_1, next_1 = run_verifier(name, [proposal], p_1MV, [torch.Generator()])
        tally.counts["tokens of probability 0"] += 1
        if end_1.tolist() != [0] or next_1.tolist() != [0]:
            tally.find(f"{name} wrote a token of probability 0")


def _check_own_tokens(seed: int, tally: Tally, V: int = 4) -> None:
    """Rounds in which the target chooses its own tokens: greedy, drawn and coupled, several
    requests in one call."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [x for x in SHAPES if len(x) < 5]
    for name, sampling in (
        ("greedy", Sampling()),
        ("point_mass", Sampling(1.0)),
        ("gumbel", Sampling(1.0, seed=seed)),
    ):
        rounds, numbers, wanted = [], [], []
        for at, parents in enumerate(shapes):
            logits_MV = torch.randn(len(parents) + 1, V, generator=generator) * 2
            tokens_N = every(V, len(parents))[
                int(torch.randint(V ** len(parents), (), generator=generator))
            ]
            u_M = torch.rand(len(parents) + 1, dtype=torch.float64, generator=generator)
            position = 10 + at
            said = []
            for node, row_V in enumerate(logits_MV):
                p_V = row_V.double().softmax(-1)
                depth = len(path_to(parents, node))
                coupled_V = p_V.log() + noise(seed, position + depth, V)
                inside = [
                    interval(p_V, t)[0] <= float(u_M[node]) < interval(p_V, t)[1] for t in range(V)
                ]
                said.append(
                    {
                        "greedy": int(row_V.argmax()),
                        "point_mass": inside.index(True),
                        "gumbel": int(coupled_V.argmax()),
                    }[name]
                )
            wanted.append(_walk_paths(tokens_N.tolist(), parents, said))
            numbers.append(u_M)
            coupled = (lambda place: noise(seed, place, V)) if name == "gumbel" else None
            proposal = Proposal(tokens_N, "point", parents=parents)
            rounds.append(
                Round(
                    logits_MV,
                    proposal,
                    name,
                    sampling,
                    NOTHING,
                    torch.Generator(),
                    coupled,
                    position,
                )
            )
        with mock.patch.object(verification, "uniform", side_effect=numbers):
            found = [(x.accepted, x.following) for x in verify_rounds(rounds)]
        tally.counts["rounds of the target's own tokens"] += len(rounds)
        if found != wanted:
            tally.find(f"{name}: a round gives {found}, not {wanted}")


def _walk_paths(
    tokens: Sequence[int], parents: Sequence[int], said: Sequence[int]
) -> tuple[list[int], int]:
    """The path of the target's own tokens, and the one after it."""
    accepted: list[int] = []
    node = 0
    while True:
        child = next(
            (
                i
                for i, parent in enumerate(parents)
                if parent == node - 1 and tokens[i] == said[node]
            ),
            None,
        )
        if child is None:
            return accepted, said[node]
        accepted.append(tokens[child])
        node = child + 1
