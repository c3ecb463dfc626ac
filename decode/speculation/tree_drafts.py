"""Building trees of drafts: choose the nodes with the most probable paths under q (law `point`);
draw every token from its q (`independent` or `causal`); or combine several drafts, kept apart
(`merge_chains`: their own law) or merged where they share a prefix (`prefix_tree`: `point`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings, point_proposal
from decode.speculation.sampling import draw
from decode.speculation.tree import chain, depths


class Candidate(NamedTuple):
    """A node that may join a tree: ln q of its path, its level from 1, its token, its parent (None
    = the root)."""

    log_q: float
    level: int
    token: int
    above: Candidate | None


Children = Callable[[int, Sequence[int | None]], Sequence[tuple[Sequence[float], Sequence[int]]]]
"""(level from 0, tokens of the parents, None = the root) → for each parent, ln q and tokens of its
most probable children, best first."""


def best_first(levels: int, nodes: int, children: Children) -> tuple[list[int], tuple[int, ...]]:
    """The `nodes` nodes with the most probable paths under q on at most `levels` levels, best
    first: tokens and parents. A path is never more probable than its prefix, so they form a
    tree."""
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
    place = {id(c): i for i, c in enumerate(found)}
    parents = tuple(-1 if c.above is None else place[id(c.above)] for c in found)
    return [c.token for c in found], parents


class Beam(NamedTuple):
    """The best nodes so far, (B, N) each: ln q of their paths, levels from 1, tokens, and the rows of
    their parents."""

    log_q: Tensor
    level: Tensor
    token: Tensor
    above: Tensor


def extend_beam(
    beam: Beam | None,
    k: int,
    values_BPW: Tensor,
    tokens_BPW: Tensor,
    nodes: int,
    room_B1: Tensor | None = None,
) -> Beam:
    """`best_first` without the host, a level at a time: the best `nodes` of a beam and of its
    children at level k + 1, of ln q `values_BPW`. room_B1: how many levels count; None = all."""
    batch, parents, width = values_BPW.shape
    if beam is not None:
        # only nodes of the last level have children that are new
        live_BP = beam.level == k
        log_q_BP = torch.where(live_BP, beam.log_q, -torch.inf)
        values_BPW = values_BPW + log_q_BP[..., None]
    if room_B1 is not None:
        values_BPW = torch.where((room_B1 > k)[..., None], values_BPW, -torch.inf)
    rows_P = torch.arange(parents, device=values_BPW.device) + (beam is not None)
    above_BPW = rows_P[:, None].expand(batch, -1, width)
    new = Beam(
        values_BPW.flatten(1),
        torch.full_like(tokens_BPW, k + 1).flatten(1),
        tokens_BPW.flatten(1),
        above_BPW.flatten(1),
    )
    every = new
    if beam is not None:
        every = Beam(*(torch.cat(pair, 1) for pair in zip(beam, new, strict=True)))
    order_BX = every.log_q.argsort(dim=1, descending=True, stable=True)
    best_BN = order_BX[:, :nodes]
    kept = Beam(*(t.gather(1, best_BN) for t in every))
    # a parent's row moves with it
    rank_X = torch.arange(order_BX.shape[1], device=order_BX.device)
    place_BX = torch.zeros_like(order_BX).scatter(1, order_BX, rank_X.expand_as(order_BX))
    above_BN = place_BX.gather(1, (kept.above - 1).clamp(min=0)) + 1
    return kept._replace(above=torch.where(kept.above > 0, above_BN, 0))


def drawn_tree_parents(nodes: int, depth: int) -> tuple[int, ...]:
    """The parents of a tree for drawn tokens: a chain as deep as allowed, and the rest of the
    `nodes` as siblings of its first and second token in turn."""
    spine = chain(min(nodes, depth))
    return spine + tuple(-1 + i % min(2, len(spine)) for i in range(nodes - len(spine)))


def draw_tree(
    parents: tuple[int, ...],
    law: Law,
    q_of: Callable[[int, Tensor], Tensor],
    siblings: Siblings,
    generator: torch.Generator,
    ids: Tensor | None = None,
) -> Proposal:
    """Draw a token from its q for every node of a tree, whose shape does not depend on them.

    Args:
        q_of: (level from 0, parents' columns (P,), −1 = the root) → q after each of them, (P, V).
        siblings: `without_replacement`: where q has no token left, the token drawn is one that no
            verifier accepts.
        ids: the tokens of the columns of q; None = all.
    """
    nodes, device, level = len(parents), generator.device, depths(parents)
    columns = [torch.full((1,), -1, device=device)] * (nodes + 1)  # the root first
    rows: list[Tensor] = [torch.empty(0)] * nodes
    for k in range(max(level)):
        own = [i for i, d in enumerate(level) if d == k + 1]
        above = sorted({parents[i] for i in own})
        first_PV = q_of(k, torch.cat([columns[parent + 1] for parent in above]))
        for q_V, parent in zip(first_PV, above, strict=True):
            left_V = q_V
            for i in (i for i in own if parents[i] == parent):
                rows[i] = q_V
                columns[i + 1] = draw(left_V, generator)[None]
                if siblings == "without_replacement":
                    left_V = left_V.index_fill(0, columns[i + 1], 0.0)
    columns_N = torch.cat(columns[1:])
    tokens_N = columns_N if ids is None else ids[columns_N]
    kind = siblings if len(set(parents)) < nodes else None
    q = DraftProbs(torch.stack(rows), ids)
    return Proposal(tokens_N, law, q, parents=parents, siblings=kind)


def merge_chains(drafts: Sequence[Proposal]) -> Proposal:
    """Chains drawn for one prefix independently from one q, as one tree: each is a branch from the
    root, and their first tokens are i.i.d. siblings."""
    parents: list[int] = []
    for x in drafts:
        parents += [-1 if i < 0 else len(parents) + i for i in chain(len(x))]
    tokens_N = torch.cat([x.tokens_K for x in drafts])
    qs = [x.q for x in drafts if x.q is not None]
    q = DraftProbs(torch.cat([x.probs for x in qs]), qs[0].ids)
    siblings: Siblings | None = "iid" if len(drafts) > 1 else None
    return Proposal(tokens_N, drafts[0].law, q, parents=tuple(parents), siblings=siblings)


def concatenate_q(qs: Sequence[DraftProbs], vocab_size: int) -> DraftProbs:
    """The rows of all; over the whole vocabulary where their ids differ."""
    ids = qs[0].ids
    if all(q.ids is ids for q in qs) or (
        ids is not None and all(q.ids is not None and torch.equal(q.ids, ids) for q in qs)
    ):
        return DraftProbs(torch.cat([q.probs for q in qs]), ids)
    return DraftProbs(torch.cat([q.dense(vocab_size) for q in qs]))


def prefix_tree(
    drafts: Sequence[Sequence[int]], device: torch.device, tree: Proposal | None = None
) -> Proposal:
    """Any drafts as one tree that holds each shared prefix once, behind the nodes of `tree`. Law
    `point`: which nodes it has is a choice."""
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
    return point_proposal(tokens, device, tuple(parents))
