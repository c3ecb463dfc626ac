"""Drafts that branch give EXACTLY the target's joint law, enumerated: every tree of up to five nodes and random larger
ones, tokens distinct or twinned among siblings, random targets with zeros, greedy and sampled.

The target says one token after every node, each from p of that node's own prefix and independent of the others. Over
everything that it may say, the path and the token after it have a law; tokens after that come from the target itself.
"""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from decode.speculation.tree import depths, walk
from decode.verification.enumeration import EXACT, Toy
from tests.builders import tree_prefixes as prefixes

Follow = Callable[[Tensor, tuple[int, ...], Tensor], tuple[Tensor, Tensor]]


def follow(tokens_N: Tensor, parents: tuple[int, ...], said_M: Tensor) -> tuple[Tensor, Tensor]:
    """`walk` for one request: which drafts are on the path, and the token after it."""
    said = said_M.tolist()
    ((path, following),) = walk([tokens_N.tolist()], [parents], lambda at: [said[i] for _, i in at])
    path_N = torch.zeros(len(parents), dtype=torch.bool)
    path_N[torch.tensor(path, dtype=torch.int64)] = True
    return path_N, torch.tensor(following)


def shapes(most: int) -> Iterator[tuple[int, ...]]:
    """Every parents tuple of 1 to `most` nodes."""
    for count in range(1, most + 1):
        yield from itertools.product(*(range(-1, i) for i in range(count)))


def distance(
    toy: Toy, tokens: tuple[int, ...], parents: tuple[int, ...], rule: Follow = follow
) -> float:
    """Total variation between the joint law of what comes out and the target's."""
    out = torch.zeros_like(toy.joint)
    before = prefixes(tokens, parents)
    rows = [toy.p[len(prefix)][prefix] for prefix in before]
    choices = [row.nonzero()[:, 0].tolist() for row in rows]
    for said in itertools.product(*choices):
        mass = float(torch.stack([row[y] for row, y in zip(rows, said, strict=True)]).prod())
        path_N, following = rule(torch.tensor(tokens), parents, torch.tensor(said))
        path = [i for i, on in enumerate(path_N.tolist()) if on]
        result = (*(tokens[i] for i in path), int(following))
        mass_at = torch.zeros((toy.V,) * len(result), dtype=torch.float64)
        mass_at[result] = mass
        out += toy.continued(mass_at)
    return float((out - toy.joint).abs().sum() / 2)


def random_tokens(count: int, V: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(V, (count,), generator=generator).tolist())


@pytest.mark.parametrize("greedy", [False, True])
def test_the_output_law_of_every_small_tree(greedy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    cases, worst = 0, 0.0
    for parents in shapes(4):
        V = 2 + cases % 2
        toy = Toy(V, max(depths(parents)), cases, greedy)
        worst = max(worst, distance(toy, random_tokens(len(parents), V, generator), parents))
        cases += 1
    for size in (5, 6):
        for _ in range(60 if greedy else 25):
            above = [int(torch.randint(-1, i, (), generator=generator)) for i in range(1, size)]
            parents = (-1, *above)
            toy = Toy(2, max(depths(parents)), cases, greedy)
            worst = max(worst, distance(toy, random_tokens(size, 2, generator), parents))
            cases += 1
    assert cases >= 80 and worst < EXACT


def test_trees_side_by_side() -> None:
    """Of any sizes: each request's path is the one it takes alone."""
    generator = torch.Generator().manual_seed(3)
    forest = (*shapes(3), ())
    tokens = [random_tokens(len(parents), 2, generator) for parents in forest]
    said = torch.randint(2, (len(forest), 4), generator=generator)
    together = walk(tokens, forest, lambda at: [int(said[b, i]) for b, i in at])
    for own, parents, said_M, found in zip(tokens, forest, said, together, strict=True):
        path_N, following = follow(torch.tensor(own, dtype=torch.int64), parents, said_M)
        assert found == (path_N.nonzero()[:, 0].tolist(), int(following))
