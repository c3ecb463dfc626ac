"""Drafts that branch: parents in, who sees whom and which path the target takes out. Tensors, no model, no host
synchronisation.

Node 0 of a call is the last committed token, the root; node i + 1 is drafted token i. `parents[i]` is the index of
drafted token i's parent, −1 for the root, and always smaller than i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor


def check_parents(parents: Sequence[int]) -> None:
    """Raises ValueError unless every parent comes before its child."""
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"node {i} of a tree has the parent {parent}: must be -1 (the root) to {i - 1}")


@lru_cache(maxsize=4096)
def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """How many drafted tokens the path to each one holds, itself included: 1 for a child of the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return tuple(found)


@lru_cache(maxsize=512)
def ancestors(parents: tuple[int, ...]) -> Tensor:
    """Bool (M, M), M = N + 1 nodes with the root first: row i is True at node i and at all above it. On the CPU."""
    see_MM = torch.eye(len(parents) + 1, dtype=torch.bool)
    for i, parent in enumerate(parents):
        see_MM[i + 1] |= see_MM[parent + 1]
    return see_MM


def within(parents: tuple[int, ...], depth: int) -> list[int]:
    """The nodes at most so deep."""
    return [i for i, d in enumerate(depths(parents)) if d <= depth]


def follow(tokens_N: Tensor, parents: tuple[int, ...], said_M: Tensor) -> tuple[Tensor, Tensor]:
    """The path that the target takes through a tree.

    Args:
        tokens_N: drafted tokens.
        said_M: what the target says next after the root and after each drafted token, (N + 1,): its argmax at
            temperature 0, else a draw from p of that very prefix, one for each node and independent of the others.

    Returns:
        On the path: bool (N,), and the target's token after its end, 0-dimensional.

    From a node the path goes on to the child that has the token which the target says there. So every token that comes
    out IS one that the target said after exactly the tokens before it: the output has the target's law, whatever
    way the tree was chosen in (without looking at `said_M`). Of siblings with one token the first counts.
    """
    device = tokens_N.device
    above_NN = ancestors(parents)[1:, 1:].to(device)
    parent_N = torch.tensor(parents, dtype=torch.int64, device=device)
    twin_NN = (parent_N[:, None] == parent_N) & (tokens_N[:, None] == tokens_N)
    said_N = said_M.index_select(0, parent_N + 1)
    hit_N = (tokens_N == said_N) & ~twin_NN.tril(-1).any(1)
    path_N = (hit_N | ~above_NN).all(1)
    place = torch.arange(1, len(parents) + 1, device=device)
    last = (path_N * place).max()  # children come after their parents: the last on the path is its end
    return path_N, said_M.index_select(0, last.reshape(1))[0]


def walk(
    tokens_N: Sequence[int], parents: tuple[int, ...], say: Callable[[int], int]
) -> tuple[list[int], int]:
    """`follow` where asking costs more than waiting: the target is asked only at the nodes on its path.

    Args:
        tokens_N: drafted tokens.
        say: node (0 = the root, i + 1 = drafted token i) → the token that the target says next there. What it would
            say at one node must not depend on where else it is asked.

    Returns:
        The drafted tokens on the path, ascending, and the target's token after its end.
    """
    children: dict[tuple[int, int], int] = {}
    for i, (token, parent) in enumerate(zip(tokens_N, parents, strict=True)):
        children.setdefault((parent, token), i)
    path: list[int] = []
    at, said = -1, say(0)
    while (child := children.get((at, said))) is not None:
        path.append(child)
        at, said = child, say(child + 1)
    return path, said
