"""Drafts that branch, described by the nodes' parents.

Node 0 of a round is the last committed token, the root; node i + 1 is drafted token i. `parents[i]`
is the index of drafted token i's parent, −1 for the root, and always smaller than i.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

Forest = tuple[tuple[int, ...], ...]
"""The parents of several requests' trees; smaller ones are padded up to the largest."""


@lru_cache(maxsize=4096)
def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """The depth of each drafted token: 1 for a child of the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return tuple(found)


def cut_tree(parents: tuple[int, ...], depth: int) -> tuple[list[int], tuple[int, ...]]:
    """The nodes of at most this depth, and their parents among themselves."""
    kept = [i for i, its in enumerate(depths(parents)) if its <= depth]
    place = {old: new for new, old in enumerate(kept)}
    return kept, tuple(place.get(parents[i], -1) for i in kept)


@lru_cache(maxsize=512)
def ancestors(parents: tuple[int, ...]) -> Tensor:
    """Bool (M, M), M = N + 1 nodes with the root first: row i is True at node i and its
    ancestors."""
    see_MM = torch.eye(len(parents) + 1, dtype=torch.bool)
    for i, parent in enumerate(parents):
        see_MM[i + 1] |= see_MM[parent + 1]
    return see_MM


@lru_cache(maxsize=4096)
def visits(parents: tuple[int, ...]) -> tuple[tuple[int, bool], ...]:
    """A depth-first walk, children in order: (node, False) on the way down, (node, True) up."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for i, parent in enumerate(parents):
        children[parent + 1].append(i)
    found: list[tuple[int, bool]] = []
    pending = [(i, False) for i in reversed(children[0])]
    while pending:
        node, leaving = pending.pop()
        found.append((node, leaving))
        if not leaving:
            pending.append((node, True))
            pending.extend((i, False) for i in reversed(children[node + 1]))
    return tuple(found)


class Visit(NamedTuple):
    """A step of the depth-first walks of several trees at once: the node of each, (B,); whether it
    is reached from above, or left (B,); and whether any of them is."""

    node_B: Tensor
    reached_B: Tensor
    left_B: Tensor
    any_reached: bool
    any_left: bool


@lru_cache(maxsize=128)
def visit_together(forest: Forest, device: torch.device) -> tuple[Visit, ...]:
    """`visits` of all trees side by side; a tree whose walk has ended stays at node 0."""
    steps = [*zip_longest(*map(visits, forest), fillvalue=(0, None))]
    nodes = [[node for node, _ in step] for step in steps]
    reached = [[leaving is False for _, leaving in step] for step in steps]
    left = [[leaving is True for _, leaving in step] for step in steps]
    node_SB = torch.tensor(nodes, device=device)
    masks_2SB = torch.tensor([reached, left], device=device)
    columns = (node_SB, *masks_2SB, map(any, reached), map(any, left))
    return tuple(Visit(*step) for step in zip(*columns, strict=True))


def chain(length: int) -> tuple[int, ...]:
    """The parents of a chain."""
    return tuple(range(-1, length - 1))


def path_to(parents: tuple[int, ...], end: int) -> list[int]:
    """The drafted tokens on the path to a node (0 = the root), ascending."""
    path: list[int] = []
    at = end - 1
    while at >= 0:
        path.append(at)
        at = parents[at]
    return path[::-1]


@lru_cache(maxsize=512)
def parent_rows(forest: Forest, size: int, device: torch.device) -> Tensor:
    """(B, N): which of the M = N + 1 rows is each token's parent, 0 = the root; 0 for padding."""
    rows = [[parent + 1 for parent in parents] + [0] * (size - len(parents)) for parents in forest]
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(forest), size)


@lru_cache(maxsize=512)
def node_depths(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """`depths` as a tensor (N,)."""
    return torch.tensor(depths(parents), dtype=torch.int64, device=device)


@lru_cache(maxsize=512)
def sizes(forest: Forest, device: torch.device) -> Tensor:
    """The number of drafted tokens of each tree, (B,)."""
    return torch.tensor([len(parents) for parents in forest], device=device)


@lru_cache(maxsize=512)
def path_masks(forest: Forest, size: int, device: torch.device) -> Tensor:
    """Bool (B, M, N): the tokens on the path to each node, itself included."""
    out_BMN = torch.zeros(len(forest), size + 1, size, dtype=torch.bool)
    for b, parents in enumerate(forest):
        out_BMN[b, : len(parents) + 1, : len(parents)] = ancestors(parents)[:, 1:]
    return out_BMN.to(device)


def walk(
    tokens: Sequence[Sequence[int]],
    forest: Sequence[tuple[int, ...]],
    choose: Callable[[list[tuple[int, int]]], Sequence[int]],
) -> list[tuple[list[int], int]]:
    """The path of each tree that holds the target's own tokens, and the target's token after it.

    The target chose every output token after exactly the tokens before it, so the output has the
    target's distribution, however the tree was chosen. The target is asked on the paths alone, one
    level of all trees at a time.

    Args:
        tokens: drafted tokens of each tree; among equal siblings the first counts.
        choose: nodes, (tree, 0 = the root or i + 1 = drafted token i) → the target's token after
            each: its argmax at temperature 0, else a draw from p given exactly that prefix. It must not
            depend on which other nodes are asked for.
    """
    children = [
        {edge: i for i, edge in reversed(list(enumerate(zip(parents, drafts, strict=True))))}
        for drafts, parents in zip(tokens, forest, strict=True)
    ]
    paths: list[list[int]] = [[] for _ in forest]
    last = [0] * len(forest)
    asked = [(b, 0) for b in range(len(forest))]
    while asked:
        further = []
        for (b, node), token in zip(asked, choose(asked), strict=True):
            last[b] = token
            child = children[b].get((node - 1, token))
            if child is not None:
                paths[b].append(child)
                further.append((b, child + 1))
        asked = further
    return list(zip(paths, last, strict=True))
