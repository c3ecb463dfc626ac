"""Trees of drafts: the best paths, drawn ones, several drafts as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch

from decode.speculation.proposal import DraftProbs, Proposal, Siblings
from decode.speculation.sampling import draw
from decode.speculation.tree import path_to
from decode.speculation.tree_drafts import (
    best_first,
    draw_tree,
    drawn_tree_parents,
    merge_chains,
    prefix_tree,
    tree_from_marginals,
)
from tests.exact_distribution import chi_square, chi_square_tail

CPU = torch.device("cpu")


def rows(K: int, V: int, seed: int) -> torch.Tensor:
    return (torch.randn(K, V, generator=torch.Generator().manual_seed(seed)) * 2).softmax(-1)


@pytest.mark.parametrize("nodes", [1, 4, 9, 30])
def test_from_marginals_takes_the_most_probable_paths(nodes: int) -> None:
    q_KV = rows(3, 4, nodes).double()
    tree = tree_from_marginals(q_KV.log(), nodes)
    assert tree.parents is not None and len(tree) == nodes and tree.law == "point"
    every = {
        path: float(torch.stack([q_KV[k, t] for k, t in enumerate(path)]).prod())
        for n in (1, 2, 3)
        for path in product(range(4), repeat=n)
    }
    found = {tuple(tree.tokens_K[path_to(tree.parents, i + 1)].tolist()) for i in range(nodes)}
    assert found == set(sorted(every, key=lambda path: -every[path])[:nodes])


def test_children_are_ranked_by_the_token_above() -> None:
    first, then = rows(1, 4, 1)[0].double(), rows(4, 4, 2).double()

    def children(level: int, above: Sequence[int | None]) -> list[tuple[list[float], list[int]]]:
        assert (level == 0) == (list(above) == [None])
        ranked = [
            (first if token is None else then[token]).log().sort(descending=True) for token in above
        ]
        return [(row.values.tolist(), row.indices.tolist()) for row in ranked]

    every = {
        path: float(first[path[0]])
        * float(torch.tensor([then[a, b] for a, b in pairwise(path)]).prod())
        for n in (1, 2, 3)
        for path in product(range(4), repeat=n)
    }
    for nodes in (1, 5, 12):
        tokens, parents = best_first(3, nodes, children)
        found = {tuple(tokens[i] for i in path_to(parents, node + 1)) for node in range(nodes)}
        assert found == set(sorted(every, key=lambda path: -every[path])[:nodes])


@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
def test_a_tree_is_drawn_level_by_level(siblings: Siblings) -> None:
    """Each token from the q of its parent's token, siblings in order, all with one generator."""
    parents = (-1, 0, -1, 2, 0, -1)
    first, then = rows(1, 4, 1)[0], rows(4, 4, 2)

    def q_of(level: int, above: torch.Tensor) -> torch.Tensor:
        assert level > 0 or above.tolist() == [-1]
        return then[above] if level else first[None]

    for seed in range(20):
        tokens, q_NV = draw_tree(parents, q_of, siblings, torch.Generator().manual_seed(seed), CPU)
        generator, expected = torch.Generator().manual_seed(seed), [-1] * len(parents)
        for parent in (-1, 0, 2):
            q_V = first if parent < 0 else then[expected[parent]]
            left_V = q_V.clone()
            for i in (i for i, above in enumerate(parents) if above == parent):
                expected[i] = int(draw(left_V, generator))
                assert torch.equal(q_NV[i], q_V)
                if siblings == "without_replacement":
                    left_V[expected[i]] = 0
        assert tokens.tolist() == expected


def test_shapes() -> None:
    assert drawn_tree_parents(3, 4) == (-1, 0, 1) and drawn_tree_parents(4, 4) == (-1, 0, 1, 2)
    assert drawn_tree_parents(7, 4) == (-1, 0, 1, 2, -1, 0, -1)
    assert drawn_tree_parents(3, 1) == (-1, -1, -1)


@pytest.mark.slow
@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
def test_drawn_trees_have_the_law_they_say(siblings: str) -> None:
    """Each token given its parent's, siblings in draw order; by counting, against the law written out."""
    first, then = rows(1, 3, 1)[0], rows(3, 3, 2)  # then: the row of the token above
    parents = (-1, 0, -1, 2)
    generator = torch.Generator().manual_seed(0)
    asked: list[list[int]] = []

    def q_of(k: int, above: torch.Tensor) -> torch.Tensor:
        asked.append(above.tolist())
        return then[above] if k else first[None]

    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(3000):
        tokens, q_NV = draw_tree(parents, q_of, siblings, generator, CPU)  # type: ignore[arg-type]
        a, b, c, d = tokens.tolist()
        assert asked.pop() == [a, c] and asked.pop() == [-1]
        assert torch.equal(q_NV, torch.stack([first, then[a], first, then[c]]))
        found[a, b, c, d] += 1
    law = {}
    for a, b, c, d in product(range(3), repeat=4):
        left = first.clone()
        if siblings == "without_replacement":
            left[a] = 0
        law[a, b, c, d] = float(first[a] * then[a, b] * left[c] / left.sum() * then[c, d])
    assert all(law[x] > 0 for x in found)
    assert chi_square_tail(*chi_square(found, law, 3000)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
def test_a_third_sibling_knows_both_others(siblings: str) -> None:
    q = rows(1, 4, 5)
    generator, found = torch.Generator().manual_seed(1), Counter[tuple[int, ...]]()
    for _ in range(4000):
        tokens, _ = draw_tree((-1, -1, -1), lambda k, above: q, siblings, generator, CPU)  # type: ignore[arg-type]
        found[tuple(tokens.tolist())] += 1
    law = {}
    for drawn in product(range(4), repeat=3):
        left, law[drawn] = q[0].clone(), 1.0
        for token in drawn:
            law[drawn] *= float(left[token] / left.sum())
            if siblings == "without_replacement":
                left[token] = 0
    assert all(law[x] > 0 for x in found)
    assert chi_square_tail(*chi_square(found, law, 4000)) > 1e-4


def test_nothing_left_to_draw() -> None:
    only = torch.tensor([[0.0, 1.0, 0.0]])
    tokens, _ = draw_tree(
        (-1, -1), lambda k, above: only, "without_replacement", torch.Generator(), CPU
    )
    assert tokens[0] == 1 and 0 <= tokens[1] < 3


def test_chains_merged() -> None:
    q = rows(5, 6, 3)
    q[3] = q[0]
    one = Proposal(torch.tensor([1, 2, 3]), "causal", DraftProbs(q[:3]))
    two = Proposal(torch.tensor([1, 5]), "causal", DraftProbs(q[3:]))
    tree = merge_chains([one, two])
    assert tree.parents == (-1, 0, 1, -1, 3) and tree.siblings == "iid" and tree.law == "causal"
    assert tree.tokens_K.tolist() == [1, 2, 3, 1, 5] and torch.equal(tree.q.dense(6), q)  # type: ignore[union-attr]
    assert merge_chains([one]).siblings is None
    unlike = Proposal(torch.tensor([1, 5]), "causal", DraftProbs(q[1:3]))
    assert merge_chains([one, unlike]).siblings == "independent"
    ids = torch.tensor([4, 2])
    sparse = [
        Proposal(torch.tensor([4]), "independent", DraftProbs(rows(1, 2, i), ids)) for i in (1, 2)
    ]
    assert merge_chains(sparse).q.ids is not None and len(merge_chains(sparse)) == 2
    chosen = merge_chains(
        [Proposal(torch.tensor([1, 2]), "point"), Proposal(torch.tensor([3]), "point")]
    )
    assert chosen.parents == (-1, 0, -1) and chosen.q is None and chosen.siblings is None
    other = Proposal(torch.tensor([4]), "independent", DraftProbs(rows(1, 2, 0), ids + 1))
    for wrong in ([one, other], [sparse[0], other], [tree]):
        with pytest.raises(ValueError, match="merge_chains"):
            merge_chains(wrong)


def test_prefix_tree_holds_every_node_once() -> None:
    tree = prefix_tree([[5, 6, 7], [5, 6, 8, 9], [5, 6], [4], []], CPU)
    assert tree.tokens_K.tolist() == [5, 6, 7, 8, 9, 4] and tree.parents == (-1, 0, 1, 1, 3, -1)
    assert tree.law == "point" and len(prefix_tree([], CPU)) == 0
