"""A proposal's law, its q and its tree belong together; several proposals as one batch."""

from typing import Any

import pytest
import torch

from decode.speculation.proposal import DraftProbs, Proposal, Siblings

TWO = torch.tensor([3, 1])
EVEN = torch.full((2, 4), 0.25)
Q = DraftProbs(EVEN)


@pytest.mark.parametrize(
    ("law", "fields", "says"),
    [
        ("point", {"q": Q}, "needs q"),
        ("beam", {}, "law must be one of"),
        ("independent", {"q": DraftProbs(torch.full((3, 4), 0.25))}, "q needs 2 rows"),
        ("unmasked", {"q": Q}, "unmask steps"),
        ("independent", {"q": Q, "siblings": "iid"}, "need siblings"),
        ("independent", {"q": Q, "parents": (-1, -1)}, "need siblings"),
        ("point", {"parents": (-1, -1), "siblings": "iid"}, "need siblings"),
        ("point", {"parents": (-1, 0, 1)}, "2 tokens need as many parents"),
        ("unmasked", {"q": Q, "steps_K": TWO, "parents": (-1, 0)}, "cannot branch"),
    ],
)
def test_fields_that_contradict_the_law(law: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Proposal(TWO, law, **fields)


@pytest.mark.parametrize("row", [[0.1] * 4, [5, -4, 0, 0], [0, 0, 0, 0], [0.24988] * 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_q_that_is_no_distribution_is_refused(row: list[float], dtype: torch.dtype) -> None:
    q = torch.tensor([[0.25] * 4, row], dtype=dtype)
    for ids in (None, torch.arange(4)):
        with pytest.raises(ValueError, match="must be a distribution"):
            DraftProbs(q, ids)


def test_other_forms_of_q_are_refused_and_a_softmax_is_not() -> None:
    with pytest.raises(ValueError, match="float32 or float64"):
        DraftProbs(EVEN.bfloat16())
    with pytest.raises(ValueError, match="with S ids"):
        DraftProbs(EVEN, torch.tensor([1, 2, 3]))
    generator = torch.Generator().manual_seed(0)
    DraftProbs(torch.randn(4, 256_000, generator=generator).mul_(4).softmax(1))
    DraftProbs(torch.full((2, 4), torch.nan))  # nothing of it is accepted


def test_sparse_q_is_the_dense_one_with_zeros() -> None:
    sparse = DraftProbs(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([3, 0]))
    dense = DraftProbs(sparse.dense(5))
    assert dense.probs.tolist() == [[0.75, 0, 0, 0.25, 0], [0, 0, 0, 1, 0]]
    for rows in (slice(1), torch.tensor([1, 0])):
        assert torch.equal(sparse.take(rows).dense(5), dense.take(rows).dense(5))


def test_what_is_cut_keeps_its_q_steps_and_parents() -> None:
    q, steps = DraftProbs(torch.eye(3)), torch.tensor([2, 0, 1])
    cut = Proposal(torch.arange(3), "unmasked", q, steps).cut(2)
    assert cut.q is not None and torch.equal(cut.q.probs, torch.eye(3)[:2])
    assert cut.steps_K is not None and cut.steps_K.tolist() == [2, 0]
    tokens = torch.tensor((7, 9, 11, 7, 30, 31, 9, 50))
    tree = Proposal(tokens, "point", parents=(-1, -1, 0, 0, 1, 3, 4, 3))
    assert tree.depth == 3 and tree.cut(9) is tree
    cut = tree.cut(2)
    assert cut.tokens_K.tolist() == [7, 9, 11, 7, 30] and cut.parents == (-1, -1, 0, 0, 1)
    ones, three = DraftProbs(torch.ones(3, 1)), torch.zeros(3, dtype=torch.int64)
    drawn = Proposal(three, "independent", ones, parents=(-1, 0, 0), siblings="iid")
    assert drawn.cut(1).parents == (-1,) and drawn.cut(1).siblings is None


@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
def test_siblings_of_one_q(siblings: Siblings) -> None:
    apart, broken = EVEN.clone(), EVEN.clone()
    apart[1, :2] = torch.tensor([0.3, 0.2])
    broken[1] = torch.nan
    with pytest.raises(ValueError, match=f"siblings drawn {siblings} share one q"):
        Proposal(TWO, "causal", DraftProbs(apart), parents=(-1, -1), siblings=siblings)
    Proposal(TWO, "causal", DraftProbs(apart), parents=(-1, -1), siblings="independent")
    Proposal(TWO, "causal", DraftProbs(apart), parents=(-1, 0))
    Proposal(TWO, "causal", DraftProbs(broken), parents=(-1, -1), siblings=siblings)
