"""Building trees of drafts. Tensors and tokens, no model.

There are three ways: choose the nodes with the most probable paths under q (law `point`); draw
every token from its q, with siblings i.i.d. or without replacement (`independent` or `causal`); or
combine several drafts, kept apart as they were drawn (`merge_chains`: their own law) or merged
where they share a prefix (`prefix_tree`: `point`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decode.speculation.proposal import DraftProbs, Proposal, Siblings
from decode.speculation.sampling import draw
from decode.speculation.tree import chain, depths


class Candidate(NamedTuple):
    """A node that may join a tree: ln q of the path to it, its level from 1, its token, its parent
    (None = the root)."""

    log_q: float
    level: int
    token: int
    above: Candidate | None


Children = Callable[[int, Sequence[int | None]], Sequence[tuple[Sequence[float], Sequence[int]]]]
"""(level from 0, tokens of the parents, None = the root) → for each parent, ln q and tokens of its
most probable children, any number, best first."""


def best_first(levels: int, nodes: int, children: Children) -> tuple[list[int], tuple[int, ...]]:
    """The `nodes` nodes with the most probable paths under q, on at most `levels` levels: tokens
    and parents.

    A path is never more probable than its prefix, so they form a tree. The choice looks at q alone,
    not at the target.
    """
    return as_tree(rank_candidates(levels, nodes, children))


def rank_candidates(levels: int, nodes: int, children: Children) -> list[Candidate]:
    """The nodes of `best_first`, the most probable path first. The first n of them are a tree
    as well."""
    found: list[Candidate] = []
    level: Sequence[Candidate | None] = [None]
    for k in range(levels):
        rows = children(k, [None if node is None else node.token for node in level])
        for node, (values, tokens) in zip(level, rows, strict=True):
            above = 0.0 if node is None else node.log_q
            found += [
                Candidate(above + v, k + 1, t, node) for v, t in zip(values, tokens, strict=True)
            ]
        found.sort(key=lambda c: (-c.log_q, c.level))
        del found[nodes:]
        level = [c for c in found if c.level == k + 1]
        if not level:
            break
    return found


def as_tree(found: Sequence[Candidate]) -> tuple[list[int], tuple[int, ...]]:
    """Tokens and parents of nodes that stand behind their parents."""
    place = {id(c): i for i, c in enumerate(found)}
    return [c.token for c in found], tuple(
        -1 if c.above is None else place[id(c.above)] for c in found
    )


def tree_from_marginals(log_q_KV: Tensor, nodes: int) -> Proposal:
    """The tree of the `nodes` most probable nodes where positions are independent of each other,
    log_q_KV (K, V)."""
    top = log_q_KV.topk(min(nodes, log_q_KV.shape[1]), dim=-1)
    rows = list(zip(top.values.tolist(), top.indices.tolist(), strict=True))
    tokens, parents = best_first(len(rows), nodes, lambda k, above: [rows[k]] * len(above))
    return Proposal(
        torch.tensor(tokens, dtype=torch.int64, device=log_q_KV.device), "point", parents=parents
    )


def drawn_tree_parents(nodes: int, depth: int) -> tuple[int, ...]:
    """The parents of a tree for drawn tokens: a chain as deep as allowed, and the rest of the
    `nodes` as siblings of its first and second token in turn."""
    spine = chain(min(nodes, depth))
    return spine + tuple(-1 + i % min(2, len(spine)) for i in range(nodes - len(spine)))


def draw_tree(
    parents: tuple[int, ...],
    q_of: Callable[[int, Tensor], Tensor],
    siblings: Siblings,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Draw a token from its q for every node: tokens (N,), and the q of each node's first sibling's
    draw, (N, V).

    Args:
        q_of: (level from 0, parents' tokens (P,), −1 = the root) → q after each of them, (P, V).
        siblings: whether siblings may repeat a token. Where q has no token left, the token drawn is
            one that no verifier accepts.
    """
    level = torch.tensor(depths(parents))
    tokens_N = torch.zeros(len(parents), dtype=torch.int64, device=device)
    rows: list[Tensor | None] = [None] * len(parents)
    for k in range(int(level.max())):
        own = [i for i, d in enumerate(level.tolist()) if d == k + 1]
        above = sorted({parents[i] for i in own})
        first_PV = q_of(k, tokens_N[above] if k else torch.full((1,), -1, device=device))
        for q_V, parent in zip(first_PV, above, strict=True):
            left_V = q_V
            for i in (i for i in own if parents[i] == parent):
                rows[i] = q_V
                tokens_N[i] = draw(left_V, generator)
                if siblings == "without_replacement":
                    left_V = left_V.index_fill(0, tokens_N[i : i + 1], 0.0)
    return tokens_N, torch.stack([row for row in rows if row is not None])


def merge_chains(drafts: Sequence[Proposal]) -> Proposal:
    """Chains drawn for one prefix independently of each other, as one tree: each is a branch from
    the root. Their first tokens are i.i.d. siblings where they were drawn from one q.

    Raises:
        ValueError: proposals of different laws, `unmasked` ones, trees, or q over different ids.
    """
    law = drafts[0].law
    if any(x.law != law or x.parents is not None for x in drafts) or law == "unmasked":
        raise ValueError("merge_chains needs chains of one law, not unmasked out of order")
    parents: list[int] = []
    for x in drafts:
        first = len(parents)
        parents += [-1 if i < 0 else first + i for i in chain(len(x))]
    tokens_N = torch.cat([x.tokens_K for x in drafts])
    qs = [x.q for x in drafts if x.q is not None]
    q = concatenate_q(qs) if qs else None
    if qs and q is None:
        raise ValueError("merge_chains needs q over the same ids")
    rows = [x.q.probs[0] for x in drafts if x.q is not None and len(x)]
    siblings: Siblings | None = None
    if len(rows) > 1:
        one_q = all(torch.equal(row, rows[0]) for row in rows)
        siblings = "iid" if one_q else "independent"
    return Proposal(tokens_N, law, q, parents=tuple(parents), siblings=siblings)


def concatenate_q(qs: Sequence[DraftProbs]) -> DraftProbs | None:
    """The rows of all, concatenated; None where they are not over the same ids."""
    ids = qs[0].ids
    for q in qs:
        if q.ids is not ids and (q.ids is None or ids is None or not torch.equal(q.ids, ids)):
            return None
    return DraftProbs(torch.cat([q.probs for q in qs]), ids)


def prefix_tree(
    drafts: Sequence[Sequence[int]], device: torch.device, tree: Proposal | None = None
) -> Proposal:
    """Any drafts as one tree that holds each shared prefix once, behind the nodes of `tree` where
    it is given. Law `point`: which nodes it has is a choice."""
    tokens = list[int]() if tree is None else tree.tokens_K.tolist()
    parents = list[int]() if tree is None else list(tree.tree)
    place = {node: i for i, node in enumerate(zip(parents, tokens, strict=True))}
    for draft in drafts:
        at = -1
        for token in draft:
            if (at, token) not in place:
                place[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = place[at, token]
    tokens_N = torch.tensor(tokens, dtype=torch.int64, device=device)
    return Proposal(tokens_N, "point", parents=tuple(parents))
