"""Check 3: the verifying functions themselves. Toy drafters of every law draw from random tables;
all their proposals, under random tables of p, have to give exactly p."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from decode.speculation import verifiers
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings, point_proposal
from decode.speculation.rules import fall_back_to_p
from decode.speculation.sampling import draw
from decode.speculation.tree import chain, path_to
from decode.speculation.verifiers import VERIFIERS, run_verifier
from decode.verification.proposals import TargetTables, every_outcome, random_rows
from decode.verification.reference import interval
from decode.verification.verdict import Tally

EXACT = 1e-9
"""The largest total variation from p that fp64 leaves."""
TREES = ((-1, -1), (-1, -1, -1), (-1, 0, 0, -1), (-1, -1, 0, 0, 1))
DRAWN: tuple[tuple[Law, Siblings | None], ...] = (
    ("point", "iid"), ("independent", "iid"), ("independent", "without_replacement"),
    ("causal", "iid"), ("causal", "without_replacement"), ("causal", "independent"),
    ("causal", None),
)  # fmt: skip
STEPS = (*permutations(range(3)), (1, 0, 1), None)
"""The step that unmasks each token of a chain; None: decided by what earlier steps drew."""
SEEDS, MOST = 2, 300  # random tables of every case, and proposals
WIDE, APART = 1100, 275
"""A vocabulary over which the tokens of a table are spread: kernels sum it in blocks."""
TRIED = 4  # of each case, proposals whose draws are tried
AWAY = 1e-4  # how far from the border of two outcomes the numbers lie that decide between them


class RandomRows(dict[Any, Tensor]):
    """A random distribution (V,) for every key."""

    def __init__(self, V: int, seed: int) -> None:
        self.V, self.generator = V, torch.Generator().manual_seed(seed)

    def __missing__(self, key: Any) -> Tensor:
        self[key] = random_rows(1, self.V, self.generator)[0]
        return self[key]


def draft_tree(
    q: RandomRows, parents: tuple[int, ...], law: Law, siblings: Siblings | None
) -> Proposal:
    """Every token from its q: of its depth, or of its path; siblings `independent`: of two, each
    has another. Without siblings a chain, which the tokens drawn so far may stop, as a confidence
    head does."""
    tokens, rows = list[int](), list[Tensor]()
    for i, parent in enumerate(parents):
        path = tuple(tokens[j] for j in path_to(parents, parent + 1))
        if siblings is None and path and q["stop", path][0] > 0.3:
            break
        earlier = [tokens[j] for j in range(i) if parents[j] == parent]
        other = siblings == "independent" and len(earlier) % 2
        rows.append(q[len(path) if law == "independent" else (path, other)])
        left_V = rows[-1].clone()
        if siblings == "without_replacement":
            left_V[earlier] = 0
        tokens.append(int(draw(left_V, q.generator)))
    tree = parents[: len(tokens)]
    if law == "point":
        return point_proposal(tokens, torch.device("cpu"), tree)
    kind = siblings if len(set(tree)) < len(tree) else None
    q_KV = DraftProbs(torch.stack(rows))
    return Proposal(torch.tensor(tokens), law, q_KV, parents=tree, siblings=kind)


def unmask(q: RandomRows, steps: Sequence[int] | None) -> Proposal:
    """A chain, every q of which looks at the tokens of EARLIER steps on both sides."""
    tokens, taken, rows = [-1] * 3, [0] * 3, [torch.empty(0)] * 3
    for step in range(3):
        state, masked = tuple(tokens), [i for i in range(3) if tokens[i] < 0]
        now = sorted(masked, key=lambda i: float(q["order", state][i]))[:1]
        if steps is not None:
            now = [i for i in masked if steps[i] == step]
        for i in now:
            rows[i], taken[i] = q[state, i], step
            tokens[i] = int(draw(rows[i], q.generator))
    q_KV, steps_K = DraftProbs(torch.stack(rows)), torch.tensor(taken)
    return Proposal(torch.tensor(tokens), "unmasked", q_KV, steps_K, state_only=True)


def toy_drafters(seed: int) -> Iterator[tuple[str, int, Callable[[], Proposal]]]:
    """Name, vocabulary size and drafter of every case."""
    for parents in (chain(1), chain(3), *TREES):
        V = 3 if len(parents) < 5 else 2
        for law, siblings in DRAWN:
            if siblings is not None or parents == chain(3):
                name = f"{law} drafts of the tree {parents}, siblings {siblings}"
                q = RandomRows(V, seed)
                yield name, V, partial(draft_tree, q, parents, law, siblings)
    for steps in STEPS:
        name = f"drafts unmasked in the steps {steps}"
        yield name, 3, partial(unmask, RandomRows(3, seed), steps)


def check_rules(tally: Tally, names: Collection[str] = tuple(VERIFIERS)) -> None:
    """Check every exact verifier (of those named) with every kind of drafts that it accepts."""
    batches: dict[Any, list[tuple[Proposal, TargetTables]]] = defaultdict(list)
    for seed in range(SEEDS):
        for drafts, V, drafter in toy_drafters(seed):
            found = every_outcome(drafter, MOST) or []
            proposals = [proposal for _, proposal in found]
            depth = max(x.depth for x in proposals)
            for name, verifier in VERIFIERS.items():
                temperature = 0.0 if verifier.greedy_only else 1.0
                fits = all(verifier.accepts(x, temperature) for x in proposals)
                if name not in names or verifier.rule is None or verifier.lossy or not fits:
                    continue
                tables = TargetTables(V, depth, seed + 1, verifier.greedy_only)
                what = f"{name} over {drafts}, seed {seed}: the output does not follow p"
                away = tables.distance(name, found)
                tally.measure("output of a rule against p, total variation", away, EXACT, what)
                for place, x in enumerate(proposals[:: 1 + len(proposals) // TRIED]):
                    key = (name, x.law, x.siblings, place % 2)
                    batches[key] += [(x, tables)] if seed else []
    for (name, _, _, place), several in batches.items():
        _check_draws(name, several, bool(place), tally)


def _check_draws(
    name: str, several: Sequence[tuple[Proposal, TargetTables]], dense: bool, tally: Tally
) -> None:
    """`run_verifier`, C kernels included, over drafts of several shapes in one batch, at numbers
    around every border between two outcomes that the rule gives each alone. The vocabulary is wide;
    q is over its tokens in another order, or `dense`, over all."""
    proposals, rows = list[Proposal](), list[Tensor]()
    numbers, wanted = list[tuple[float, float]](), list[tuple[int, int]]()
    size = 1 + max(len(x) for x, _ in several)
    for proposal, tables in several:
        out, p_1MV = tables.outcomes(name, [proposal])
        rest_MV = fall_back_to_p(out.rest_BMV[0], p_1MV[0])
        ids = APART * torch.arange(tables.V) + 7
        q = proposal.q
        if q is not None:
            q = DraftProbs(q.probs.float().flip(1).contiguous(), ids.flip(0))
            q = DraftProbs(q.dense(WIDE)) if dense else q
        p_MV = torch.zeros(size, WIDE)
        p_MV[: len(rest_MV), ids] = p_1MV[0].float()
        for node, token in product(range(len(rest_MV)), range(tables.V)):
            u, v = interval(out.stop_BM[0], node), interval(rest_MV[node], token)
            numbers += product(_within(u), _within(v))
            wanted += [(node, int(ids[token]))] * (len(numbers) - len(wanted))
        wide = replace(proposal, tokens_K=ids[proposal.tokens_K], q=q)
        proposals += [wide] * (len(numbers) - len(proposals))
        rows += [p_MV] * (len(numbers) - len(rows))
    u_B2 = [torch.tensor(pair, dtype=torch.float64) for pair in numbers]
    with mock.patch.object(verifiers, "uniform", side_effect=u_B2):
        generators = [torch.Generator()] * len(numbers)
        ends = run_verifier(name, proposals, torch.stack(rows), generators)
    tally.counts["outcomes at a border"] += len(numbers)
    found = list(zip(*(end_B.tolist() for end_B in ends), strict=True))
    if found != wanted:
        at = next(i for i, one in enumerate(found) if one != wanted[i])
        what = f"{name} over the tree {proposals[at].tree}: numbers {numbers[at]} give node and"
        tally.find(f"{what} token {found[at]}, not {wanted[at]}")


def _within(bounds: tuple[float, float]) -> tuple[float, ...]:
    """Numbers just inside an interval; none where it is too narrow."""
    low, high = bounds
    return (low + AWAY, high - AWAY) if high - low > 4 * AWAY else ()
