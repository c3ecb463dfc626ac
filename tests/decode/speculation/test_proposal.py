"""A proposal's kind, its q and its tree belong together."""

from __future__ import annotations

import pytest
import torch

from decode.speculation.proposal import DenseQ, Proposal, SparseQ
from decode.speculation.verifiers import run_verifier

TOKENS = torch.tensor([3, 1])


Q = DenseQ(torch.full((2, 4), 0.25))


def test_a_law_and_its_q_belong_together() -> None:
    with pytest.raises(ValueError, match="'point' has no q"):
        Proposal(TOKENS, "point", Q)
    for law in ("independent", "causal", "unmasked"):
        with pytest.raises(ValueError, match=f"'{law}' needs the q"):
            Proposal(TOKENS, law)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown law"):
        Proposal(TOKENS, "beam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows of q"):
        Proposal(TOKENS, "independent", DenseQ(torch.full((3, 4), 0.25)))
    with pytest.raises(ValueError, match="needs unmask steps"):
        Proposal(TOKENS, "unmasked", Q)
    with pytest.raises(ValueError, match="has no unmask steps"):
        Proposal(TOKENS, "independent", Q, steps_K=TOKENS)
    with pytest.raises(ValueError, match="int64"):
        Proposal(TOKENS.int(), "point")
    with pytest.raises(ValueError, match="as many ids"):
        SparseQ(torch.tensor([1, 2, 3]), torch.full((2, 2), 0.5))


@pytest.mark.parametrize("row", [[0.1] * 4, [5, -4, 0, 0], [3, 1, -3, 0], [0, 0, 0, 0]])
def test_a_q_that_is_no_distribution_is_refused(row: list[float]) -> None:
    with pytest.raises(ValueError, match="must be a distribution"):
        DenseQ(torch.tensor([[0.25] * 4, row]))
    with pytest.raises(ValueError, match="must be a distribution"):
        SparseQ(torch.arange(4), torch.tensor([row], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_probabilities_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="float32 or float64"):
        DenseQ(torch.full((2, 4), 0.25, dtype=dtype))
    with pytest.raises(ValueError, match="fp32 or fp64"):
        p_BMV = torch.full((1, 3, 4), 0.25, dtype=dtype)
        run_verifier("token", [Proposal(TOKENS, "independent", Q)], p_BMV, [torch.Generator()])


def test_sparse_q_is_the_dense_one_with_zeros() -> None:
    sparse = SparseQ(torch.tensor([3, 0]), torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
    dense = DenseQ(sparse.dense(5))
    assert dense.probs_KV.tolist() == [[0.75, 0, 0, 0.25, 0], [0, 0, 0, 1, 0]]
    for rows in (slice(1), torch.tensor([1, 0])):
        assert torch.equal(sparse.take(rows).dense(5), dense.take(rows).dense(5))
    assert len(sparse.take(slice(1))) == 1


PARENTS = (-1, -1, 0, 0, 1, 3, 4, 3)


NODE_TOKENS = (7, 9, 11, 7, 30, 31, 9, 50)


def test_proposals_that_branch() -> None:
    tree = Proposal(torch.tensor(NODE_TOKENS), "point", parents=PARENTS)
    assert tree.depth == 3 and tree.cut(9) is tree
    cut = tree.cut(2)
    assert cut.tokens_K.tolist() == [7, 9, 11, 7, 30] and cut.parents == (-1, -1, 0, 0, 1)
    with pytest.raises(ValueError, match="8 drafted tokens, but 2 parents"):
        Proposal(torch.tensor(NODE_TOKENS), "point", parents=(-1, 0))
    q = DenseQ(torch.ones(2, 1))
    with pytest.raises(ValueError, match="need to say how siblings were drawn"):
        Proposal(torch.tensor([0, 0]), "independent", q, parents=(-1, -1))
    with pytest.raises(ValueError, match="have no siblings"):
        Proposal(torch.tensor([0, 0]), "independent", q, parents=(-1, 0), siblings="iid")
    with pytest.raises(ValueError, match="have no siblings"):
        Proposal(torch.tensor([0, 0]), "point", parents=(-1, -1), siblings="iid")
    with pytest.raises(ValueError, match="unknown siblings 'sorted'"):
        Proposal(torch.tensor([0, 0]), "independent", q, parents=(-1, -1), siblings="sorted")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unmasked out of order cannot branch"):
        Proposal(torch.tensor([0, 0]), "unmasked", q, torch.tensor([0, 1]), parents=(-1, 0))
    with pytest.raises(ValueError, match="state_only is said of unmasked"):
        Proposal(torch.tensor([0, 0]), "independent", q, state_only=True)
