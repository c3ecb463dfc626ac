from dataclasses import replace

import pytest
import torch

from align.common.errors import UserError
from decode.speculation.drafts import Drafts
from decode.speculation.proposal import DenseQ, Proposal, SparseQ
from decode.speculation.rules import accept_probability
from decode.speculation.verifiers import VERIFIERS, check_pair, check_proposal, choose, run_verifier

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


def test_trees_and_chains_of_one_law_share_a_batch() -> None:
    """Whatever the kind of siblings: each as it is alone."""
    q = DenseQ(torch.tensor([[0.2, 0.3, 0.5, 0.0]] * 3))
    tree = Proposal(
        torch.tensor([2, 1, 0]), "independent", q, parents=(-1, -1, 0), siblings="without_replacement"
    )
    chain = Proposal(torch.tensor([1, 2]), "independent", DenseQ(q.probs_KV[:2]))
    p_BMV = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(2, 4, 4)
    for name in ("recursive", "traversal", "point_mass"):
        for seed in range(20):
            generators = [torch.Generator().manual_seed(seed + b) for b in range(2)]
            both = run_verifier(name, [tree, chain], p_BMV, generators)
            for b, (one, rows) in enumerate(((tree, 4), (chain, 3))):
                alone = run_verifier(name, [one], p_BMV[:1, :rows], [torch.Generator().manual_seed(seed + b)])
                assert (int(both.end_B[b]), int(both.next_B[b])) == (int(alone.end_B), int(alone.next_B))
    other = Proposal(torch.tensor([2, 1, 0]), "independent", q, parents=(-1, -1, 0), siblings="iid")
    with pytest.raises(ValueError, match="kinds of siblings"):
        run_verifier("recursive", [tree, other], p_BMV, [torch.Generator(), torch.Generator()])


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


def test_acceptance_at_the_edges() -> None:
    p, q = torch.tensor([0.0, 0.0, 0.5, 0.5, 0.2]), torch.tensor([0.0, 0.5, 0.0, 0.5, 0.8])
    assert accept_probability(p, q).tolist() == pytest.approx([0, 0, 1, 1, 0.25])


def test_p_equal_to_q_accepts_everything_and_rounding_leaves_no_nan() -> None:
    row = torch.rand(4) ** 2
    p_BMV = (row / row.sum()).expand(1, 3, 4)
    proposal = Proposal(torch.tensor([0, 3]), "independent", DenseQ(p_BMV[0, :2]))
    generator = torch.Generator().manual_seed(0)
    for name in ("token", "block", "recursive", "traversal", "k_seq", "hybrid"):
        assert all(int(run_verifier(name, [proposal], p_BMV, [generator]).end_B) == 2 for _ in range(20))
        out = VERIFIERS[name].rule(p_BMV, Drafts.of([proposal], 4))  # type: ignore[misc]
        assert bool(out.rest_BMV.isfinite().all())


def test_pairs_that_would_change_the_output_are_refused_with_the_reason() -> None:
    with pytest.raises(
        UserError,
        match=r"'point' drafts.*not drawn from any q.*these fit: point_mass, self_selection, gumbel$",
    ):
        check_pair("point", "token", 1.0)
    with pytest.raises(
        UserError,
        match=r"'unmasked' drafts.*out of order.*these fit: point_mass, self_selection, hybrid, gumbel$",
    ):
        check_pair("unmasked", "token", 1.0)
    with pytest.raises(
        UserError,
        match=r"exact only at temperature 0, not at 0.7; these fit: point_mass, self_selection, token, block",
    ):
        check_pair("independent", "greedy", 0.7)
    with pytest.raises(UserError, match=r"these fit: greedy, point_mass, self_selection, gumbel$"):
        check_pair("point", "token", 0.0)
    with pytest.raises(UserError, match=r"unknown verifier 'tokens' \(did you mean 'token'"):
        check_pair("point", "tokens", 0.0)
    with pytest.raises(UserError, match="these fit"):
        run_verifier("token", [Proposal(TOKENS, "point")], torch.full((1, 3, 4), 0.25), [torch.Generator()])


def test_auto_always_fits() -> None:
    for law in ("point", "independent", "causal", "unmasked"):
        for temperature in (0.0, 1.0):
            check_pair(law, choose(law, temperature), temperature)
    assert [choose("causal", 1.0), choose("point", 1.0), choose("causal", 0.0)] == [
        "traversal",
        "point_mass",
        "greedy",
    ]


def test_proposals_that_a_verifier_cannot_have_are_refused_with_the_reason() -> None:
    q = DenseQ(torch.full((2, 4), 0.25))
    siblings = Proposal(TOKENS, "independent", q, parents=(-1, -1), siblings="without_replacement")
    with pytest.raises(
        UserError,
        match="they branch, and it is exact only for chains; these fit: point_mass, self_selection, rec",
    ):
        check_proposal(siblings, "token", 1.0)
    with pytest.raises(
        UserError, match="siblings were drawn without_replacement, and it is exact only for iid"
    ):
        check_proposal(siblings, "k_seq", 1.0)
    with pytest.raises(UserError, match="argmax, which is exact only at temperature 0"):
        check_proposal(siblings, "greedy", 1.0)
    surest = Proposal(TOKENS, "unmasked", q, steps_K=TOKENS)
    with pytest.raises(
        UserError, match=r"looked at the values drawn.*these fit: point_mass, self_selection, gumbel$"
    ):
        check_proposal(surest, "hybrid", 1.0)
    assert check_proposal(replace(surest, state_only=True), "hybrid", 1.0).name == "hybrid"
    assert check_proposal(siblings, "traversal", 1.0).name == "traversal"
