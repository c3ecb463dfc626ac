"""A proposal's kind, its q and its tree belong together."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from decode.speculation.proposal import DraftProbs, Proposal, Siblings
from decode.speculation.sampling import NOTHING, Sampling
from decode.speculation.verification import Round, verify_rounds
from decode.speculation.verifiers import run_verifier

TOKENS = torch.tensor([3, 1])


Q = DraftProbs(torch.full((2, 4), 0.25))


def test_a_law_and_its_q_belong_together() -> None:
    with pytest.raises(ValueError, match="'point' has no q"):
        Proposal(TOKENS, "point", Q)
    for law in ("independent", "causal", "unmasked"):
        with pytest.raises(ValueError, match=f"'{law}' needs the q"):
            Proposal(TOKENS, law)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown law"):
        Proposal(TOKENS, "beam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows of q"):
        Proposal(TOKENS, "independent", DraftProbs(torch.full((3, 4), 0.25)))
    with pytest.raises(ValueError, match="needs unmask steps"):
        Proposal(TOKENS, "unmasked", Q)
    with pytest.raises(ValueError, match="has no unmask steps"):
        Proposal(TOKENS, "independent", Q, steps_K=TOKENS)
    with pytest.raises(ValueError, match="have no siblings$"):
        Proposal(TOKENS, "independent", Q, siblings="iid")
    with pytest.raises(ValueError, match="int64"):
        Proposal(TOKENS.int(), "point")
    with pytest.raises(ValueError, match="as many ids"):
        DraftProbs(torch.full((2, 2), 0.5), torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("row", [[0.1] * 4, [5, -4, 0, 0], [3, 1, -3, 0], [0, 0, 0, 0]])
def test_a_q_that_is_no_distribution_is_refused(row: list[float]) -> None:
    with pytest.raises(ValueError, match="must be a distribution"):
        DraftProbs(torch.tensor([[0.25] * 4, row]))
    with pytest.raises(ValueError, match="must be a distribution"):
        DraftProbs(torch.tensor([row], dtype=torch.float64), torch.arange(4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_probabilities_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="float32 or float64"):
        DraftProbs(torch.full((2, 4), 0.25, dtype=dtype))
    with pytest.raises(ValueError, match="fp32 or fp64"):
        p_BMV = torch.full((1, 3, 4), 0.25, dtype=dtype)
        run_verifier("token", [Proposal(TOKENS, "independent", Q)], p_BMV, [torch.Generator()])


def test_sparse_q_is_the_dense_one_with_zeros() -> None:
    sparse = DraftProbs(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([3, 0]))
    dense = DraftProbs(sparse.dense(5))
    assert dense.probs.tolist() == [[0.75, 0, 0, 0.25, 0], [0, 0, 0, 1, 0]]
    for rows in (slice(1), torch.tensor([1, 0])):
        assert torch.equal(sparse.take(rows).dense(5), dense.take(rows).dense(5))
    assert len(sparse.take(slice(1))) == 1


def test_a_chain_that_is_cut_keeps_its_q_and_steps() -> None:
    q, steps = DraftProbs(torch.eye(3)), torch.tensor([2, 0, 1])
    cut = Proposal(torch.arange(3), "unmasked", q, steps).cut(2)
    assert cut.q is not None and torch.equal(cut.q.probs, torch.eye(3)[:2])
    assert (
        cut.tokens_K.tolist() == [0, 1]
        and cut.steps_K is not None
        and cut.steps_K.tolist() == [2, 0]
    )


PARENTS = (-1, -1, 0, 0, 1, 3, 4, 3)


NODE_TOKENS = (7, 9, 11, 7, 30, 31, 9, 50)


def test_proposals_that_branch() -> None:
    tree = Proposal(torch.tensor(NODE_TOKENS), "point", parents=PARENTS)
    assert tree.depth == 3 and tree.cut(9) is tree
    cut = tree.cut(2)
    assert cut.tokens_K.tolist() == [7, 9, 11, 7, 30] and cut.parents == (-1, -1, 0, 0, 1)
    drawn = Proposal(
        torch.zeros(3, dtype=torch.int64),
        "independent",
        DraftProbs(torch.ones(3, 1)),
        parents=(-1, 0, 0),
        siblings="iid",
    )
    assert drawn.cut(1).parents == (-1,) and drawn.cut(1).siblings is None
    with pytest.raises(ValueError, match="8 drafted tokens, but 2 parents"):
        Proposal(torch.tensor(NODE_TOKENS), "point", parents=(-1, 0))
    q = DraftProbs(torch.ones(2, 1))
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
    with pytest.raises(ValueError, match="state_only belongs to unmasked"):
        Proposal(torch.tensor([0, 0]), "independent", q, state_only=True)


EVEN = torch.full((2, 4), 0.25)
OFF = {
    "mass .9995": EVEN * 0.9995,
    "mass 1.0005": EVEN * 1.0005,
    "below 0": torch.tensor([[0.5, 0.6, -0.1, 0.0]] * 2),
}


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("double", [False, True])
def test_q_is_a_distribution(off: str, double: bool) -> None:
    q = OFF[off].double() if double else OFF[off]
    with pytest.raises(ValueError, match="each row of q must be a distribution"):
        DraftProbs(q)
    with pytest.raises(ValueError, match="each row of q must be a distribution"):
        DraftProbs(q, torch.arange(4))


ROWS = {
    **OFF,
    "even": EVEN,
    "zeros": torch.eye(4)[:2],
    "NaN": torch.full((2, 4), math.nan),
    "infinity": torch.tensor([[math.inf, 0.5, 0.5, 0.0]] * 2),
    "no rows": torch.zeros(0, 4),
}


@pytest.mark.parametrize("rows", ROWS)
def test_both_checks_of_q_agree(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once on a CPU, and with the round's outcome elsewhere."""
    improper = rows in OFF
    with pytest.raises(ValueError, match="distribution") if improper else nullcontext():
        DraftProbs(ROWS[rows])
    monkeypatch.setattr("decode.speculation.proposal.SEEN_AT_ONCE", frozenset())
    tokens = torch.zeros(len(ROWS[rows]), dtype=torch.int64)
    faults = Proposal(tokens, "independent", DraftProbs(ROWS[rows])).faults()
    assert faults is not None and faults.tolist() == [int(improper)] and faults.dtype == torch.int64


def test_a_softmax_over_many_ids_is_a_distribution() -> None:
    DraftProbs(
        torch.randn(4, 256_000, generator=torch.Generator().manual_seed(0)).mul_(4).softmax(1)
    )


@pytest.mark.parametrize("siblings", ["iid", "without_replacement"])
def test_siblings_of_one_q(siblings: Siblings) -> None:
    apart, broken = EVEN.clone(), EVEN.clone()
    apart[1, :2] = torch.tensor([0.3, 0.2])
    broken[1] = torch.nan
    two = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=f"siblings drawn {siblings} share one q"):
        Proposal(two, "causal", DraftProbs(apart), parents=(-1, -1), siblings=siblings)
    Proposal(two, "causal", DraftProbs(apart), parents=(-1, -1), siblings="independent")
    Proposal(two, "causal", DraftProbs(apart), parents=(-1, 0))
    Proposal(two, "causal", DraftProbs(broken), parents=(-1, -1), siblings=siblings)


@pytest.mark.parametrize("verifier", ["recursive", "traversal", "k_seq"])
@pytest.mark.parametrize("fault", ["mass", "siblings", None])
def test_what_is_not_seen_at_once_is_seen_with_the_outcome(
    fault: str | None, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where looking at q before the round's one transfer would synchronise."""
    monkeypatch.setattr("decode.speculation.proposal.SEEN_AT_ONCE", frozenset())
    q = EVEN.clone()
    if fault == "mass":
        q *= 0.999
    elif fault == "siblings":
        q[1] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    proposal = Proposal(
        torch.tensor([0, 1]), "independent", DraftProbs(q), parents=(-1, -1), siblings="iid"
    )

    def verify() -> None:
        given = (torch.zeros(3, 4), proposal, verifier, Sampling(1.0), NOTHING, torch.Generator())
        verify_rounds([Round(*given)])

    if fault is None:
        verify()
    else:
        with pytest.raises(ValueError, match="distribution" if fault == "mass" else "share one q"):
            verify()
