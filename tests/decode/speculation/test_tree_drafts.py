"""Trees of drafts: the best paths, drawn ones, several drafts as one."""

import pytest
import torch

from decode.speculation.proposal import DraftProbs, Proposal, Siblings
from decode.speculation.sampling import draw
from decode.speculation.tree_drafts import draw_tree, drawn_tree_parents, merge_chains, prefix_tree

CPU = torch.device("cpu")


def rows(K: int, V: int, seed: int) -> torch.Tensor:
    return (torch.randn(K, V, generator=torch.Generator().manual_seed(seed)) * 2).softmax(-1)


@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
def test_a_tree_is_drawn_level_by_level(siblings: Siblings) -> None:
    """Each token from the q of its parent's token, siblings in order, all with one generator."""
    first, then = rows(1, 4, 1)[0], rows(4, 4, 2)
    parents = drawn_tree_parents(6, 2)
    assert parents == (-1, 0, -1, 0, -1, 0)

    def q_of(level: int, above: torch.Tensor) -> torch.Tensor:
        assert level > 0 or above.tolist() == [-1]
        return then[above] if level else first[None]

    for seed in range(20):
        found = draw_tree(parents, "causal", q_of, siblings, torch.Generator().manual_seed(seed))
        assert found.parents == parents and found.siblings == siblings and found.q is not None
        generator, expected = torch.Generator().manual_seed(seed), [-1] * len(parents)
        for parent in (-1, 0):
            q_V = first if parent < 0 else then[expected[parent]]
            left_V = q_V.clone()
            for i in (i for i, above in enumerate(parents) if above == parent):
                expected[i] = int(draw(left_V, generator))
                assert torch.equal(found.q.probs[i], q_V)
                if siblings == "without_replacement":
                    left_V[expected[i]] = 0
        assert found.tokens_K.tolist() == expected


def test_chains_merged() -> None:
    q = rows(3, 6, 3)
    drafts = [Proposal(torch.tensor(t), "causal", DraftProbs(q)) for t in ([1, 2, 3], [1, 5, 0])]
    tree = merge_chains(drafts)
    assert tree.parents == (-1, 0, 1, -1, 3, 4) and tree.siblings == "iid" and tree.law == "causal"
    assert tree.tokens_K.tolist() == [1, 2, 3, 1, 5, 0] and tree.q is not None
    assert torch.equal(tree.q.dense(6), torch.cat((q, q)))
    assert merge_chains(drafts[:1]).siblings is None


def test_prefix_tree_holds_every_node_once() -> None:
    tree = prefix_tree([[5, 6, 7], [5, 6, 8, 9], [5, 6], [4], []], CPU)
    assert tree.tokens_K.tolist() == [5, 6, 7, 8, 9, 4] and tree.parents == (-1, 0, 1, 1, 3, -1)
    assert tree.law == "point" and len(prefix_tree([], CPU)) == 0
