"""Drafts that branch: depths, ancestors and the accepted path, all computed from the nodes' parents. Tensors, no model, no
host synchronisation.

Node 0 of a call is the last committed token, the root; node i + 1 is drafted token i. `parents[i]` is the index of
drafted token i's parent, −1 for the root, and always smaller than i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

MOST_NODES = 512
"""The largest tree of one call."""


def check_parents(parents: Sequence[int]) -> None:
    """Raises ValueError where a parent does not come before its child."""
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"node {i} of a tree has the parent {parent}: must be -1 (the root) to {i - 1}")


@lru_cache(maxsize=4096)
def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """The depth of each drafted token: 1 for a child of the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return tuple(found)


@lru_cache(maxsize=512)
def ancestors(parents: tuple[int, ...]) -> Tensor:
    """Bool (M, M), M = N + 1 nodes with the root first: row i is True at node i and its ancestors. On the CPU."""
    see_MM = torch.eye(len(parents) + 1, dtype=torch.bool)
    for i, parent in enumerate(parents):
        see_MM[i + 1] |= see_MM[parent + 1]
    return see_MM


@lru_cache(maxsize=4096)
def visits(parents: tuple[int, ...]) -> tuple[tuple[int, bool], ...]:
    """A depth-first walk, children in order: (node, False) on the way down, (node, True) on the way up."""
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


def nodes_within(parents: tuple[int, ...], depth: int) -> list[int]:
    """The nodes of at most that depth."""
    return [i for i, d in enumerate(depths(parents)) if d <= depth]


Forest = tuple[tuple[int, ...], ...]
"""The parents of several requests' trees. Smaller ones are padded up to the largest."""


@lru_cache(maxsize=512)
def parent_rows(forest: Forest, size: int) -> Tensor:
    """(B, N): which of the M = N + 1 rows of a call is each token's parent, 0 = the root; 0 for padding. On the CPU."""
    rows = [[parent + 1 for parent in parents] + [0] * (size - len(parents)) for parents in forest]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(forest), size)


@lru_cache(maxsize=512)
def path_masks(forest: Forest, size: int) -> Tensor:
    """Bool (B, M, N): the tokens on the path to each node, itself included. On the CPU."""
    out_BMN = torch.zeros(len(forest), size + 1, size, dtype=torch.bool)
    for b, parents in enumerate(forest):
        out_BMN[b, : len(parents) + 1, : len(parents)] = ancestors(parents)[:, 1:]
    return out_BMN


def follow(tokens_BN: Tensor, forest: Forest, said_BM: Tensor) -> tuple[Tensor, Tensor]:
    """The path of each tree that holds the target's own tokens.

    Args:
        tokens_BN: drafted tokens.
        said_BM: the target's own token after the root and after each drafted token: its argmax at temperature 0, else a draw
            from p given exactly that prefix, independent of the other nodes' (or made with the noise of the position:
            `gumbel`).

    Returns:
        The node where the path ends, (B,), 0 = the root; and the target's token after it, (B,).

    From a node the path continues with the child that holds the target's token there. So the target chose every output token
    after exactly the tokens before it, and the output has the target's distribution, however the tree was chosen, as long as
    its choice did not depend on `said_BM`. Among siblings with the same token the first counts.
    """
    device, size = tokens_BN.device, tokens_BN.shape[1]
    above_BN = parent_rows(forest, size).to(device)
    on_BNN = path_masks(forest, size).to(device)[:, 1:]
    twin_BNN = (above_BN[:, :, None] == above_BN[:, None]) & (tokens_BN[:, :, None] == tokens_BN[:, None])
    hit_BN = (tokens_BN == said_BM.gather(1, above_BN)) & ~twin_BNN.tril(-1).any(2)
    path_BN = (hit_BN[:, None] | ~on_BNN).all(2) & on_BNN.any(2)  # padding is on no path
    place_N = torch.arange(1, size + 1, device=device)
    # children come after their parents: the last on the path is its end
    end_B = (path_BN * place_N).amax(1) if size else torch.zeros_like(said_BM[:, 0])
    return end_B, said_BM.gather(1, end_B[:, None])[:, 0]


def walk(
    tokens_N: Sequence[int], parents: tuple[int, ...], say: Callable[[int], int]
) -> tuple[list[int], int]:
    """`follow` for one tree on a CPU: the target's token is computed only at the nodes on its path.

    Args:
        tokens_N: drafted tokens.
        say: node (0 = the root, i + 1 = drafted token i) → the target's token after it. It must not depend on which other
            nodes are asked for.

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
