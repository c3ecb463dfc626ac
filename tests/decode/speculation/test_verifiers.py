from dataclasses import replace

import pytest
import torch

from decode.speculation.drafts import Drafts
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.rules import Outcomes
from decode.speculation.sampling import uniform
from decode.speculation.verifiers import (
    VERIFIERS,
    check_pair,
    check_proposal,
    choose,
    resolve,
    run_verifier,
)
from specalign.common.errors import UserError

TOKENS = torch.tensor([3, 1])


def test_trees_and_chains_of_one_law_share_a_batch() -> None:
    """Whatever the kind of siblings: each as it is alone."""
    q = DraftProbs(torch.tensor([[0.2, 0.3, 0.5, 0.0]] * 3))
    tree = Proposal(
        torch.tensor([2, 1, 0]),
        "independent",
        q,
        parents=(-1, -1, 0),
        siblings="without_replacement",
    )
    chain = Proposal(torch.tensor([1, 2]), "independent", DraftProbs(q.probs[:2]))
    p_BMV = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(2, 4, 4)
    for name in ("recursive", "traversal", "point_mass"):
        for seed in range(20):
            generators = [torch.Generator().manual_seed(seed + b) for b in range(2)]
            both = run_verifier(name, [tree, chain], p_BMV, generators)
            for b, (one, rows) in enumerate(((tree, 4), (chain, 3))):
                alone = run_verifier(
                    name, [one], p_BMV[:1, :rows], [torch.Generator().manual_seed(seed + b)]
                )
                assert (int(both.end_B[b]), int(both.next_B[b])) == (
                    int(alone.end_B),
                    int(alone.next_B),
                )
    other = Proposal(torch.tensor([2, 1, 0]), "independent", q, parents=(-1, -1, 0), siblings="iid")
    with pytest.raises(ValueError, match="kinds of siblings"):
        run_verifier("recursive", [tree, other], p_BMV, [torch.Generator(), torch.Generator()])


def test_q_of_fp64_beside_p_of_fp32() -> None:
    """Every verifier takes it, along chains and trees, and ends where it ends with the same q in fp32."""
    p_BMV = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(1, 4, 4)
    rows = torch.tensor([[0.25, 0.25, 0.5, 0.0]] * 3)
    for name, siblings in {
        "token": None,
        "block": None,
        "recursive": "without_replacement",
        "k_seq": "iid",
    }.items():
        parents = None if siblings is None else (-1, -1, 0)
        for seed in range(20):
            ends = []
            for q in (DraftProbs(rows), DraftProbs(rows.double())):
                draft = Proposal(
                    torch.tensor([2, 1, 0]), "causal", q, parents=parents, siblings=siblings
                )  # type: ignore[arg-type]
                found = run_verifier(name, [draft], p_BMV, [torch.Generator().manual_seed(seed)])
                ends.append((int(found.end_B), int(found.next_B)))
            assert ends[0] == ends[1]


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
    with pytest.raises(
        UserError,
        match=r"argmaxes, not draws.*these fit: greedy, point_mass, self_selection, gumbel$",
    ):
        check_pair("point", "token", 0.0)
    with pytest.raises(UserError, match="unmasked out of order"):
        check_pair("unmasked", "token", 0.0)
    with pytest.raises(UserError, match=r"unknown verifier 'tokens' \(did you mean 'token'"):
        check_pair("point", "tokens", 0.0)
    with pytest.raises(UserError, match="these fit"):
        run_verifier(
            "token", [Proposal(TOKENS, "point")], torch.full((1, 3, 4), 0.25), [torch.Generator()]
        )


def test_the_end_and_the_token_have_a_uniform_each() -> None:
    p_BMV = torch.full((4, 2, 2), 0.5)
    outcomes = Outcomes(
        torch.tensor([[0.5, 0.5]] * 4), torch.tensor([[[1.0, 3.0], [0.0, 0.0]]] * 4)
    )
    u_B2 = torch.tensor([[0.4, 0.2], [0.4, 0.6], [0.6, 0.4], [0.6, 0.6]], dtype=torch.float64)
    found = resolve(outcomes, p_BMV, u_B2)
    assert found.end_B.tolist() == [0, 0, 1, 1]
    assert found.next_B.tolist() == [0, 1, 0, 1]  # after node 1 zeros are left: p itself


@pytest.mark.parametrize("name", ["traversal", "recursive", "k_seq"])
def test_what_is_not_a_chain_in_fp32_is_verified_in_torch(name: str) -> None:
    """The C function takes block verification of chains alone; all else ends where the rule ends. Two uniforms are drawn."""
    generator = torch.Generator().manual_seed(0)
    p_BMV = torch.rand(2, 4, 5, generator=generator).softmax(-1)
    q_KV = torch.rand(3, 5, generator=generator).softmax(-1)
    q_KV[1] = q_KV[0]
    tokens = torch.tensor([2, 1, 0])
    chain = Proposal(tokens, "causal", DraftProbs(q_KV))
    tree = Proposal(tokens, "causal", DraftProbs(q_KV), parents=(-1, -1, 0), siblings="iid")
    double = Proposal(tokens, "causal", DraftProbs(q_KV.double()))
    empty = Proposal(tokens[:0], "causal", DraftProbs(q_KV[:0]))
    for batch in ([chain], [tree], [double], [chain, tree], [chain, empty], [chain, double]):
        p, ends = p_BMV[: len(batch)], set()
        outcomes = VERIFIERS[name].rule(p, Drafts.of(batch, 5))  # type: ignore[misc]
        for seed in range(30):
            seeds = [seed + 100 * b for b in range(len(batch))]
            drawn, other = ([torch.Generator().manual_seed(x) for x in seeds] for _ in range(2))
            found = run_verifier(name, batch, p, drawn)
            expected = resolve(outcomes, p, torch.stack([uniform(2, x) for x in other]))
            assert all(
                torch.equal(a.get_state(), b.get_state()) for a, b in zip(drawn, other, strict=True)
            )
            assert torch.equal(found.end_B, expected.end_B) and torch.equal(
                found.next_B, expected.next_B
            )
            ends.update(found.end_B.tolist())
        assert len(ends) > 1


def test_auto_always_fits() -> None:
    for law in ("point", "independent", "causal", "unmasked"):
        for temperature in (0.0, 1.0):
            check_pair(law, choose(law, temperature), temperature)
    assert [choose(law, 1.0) for law in ("causal", "unmasked", "point")] == [
        "traversal",
        "hybrid",
        "point_mass",
    ]
    assert choose("causal", 0.0) == "greedy"


def test_proposals_that_a_verifier_cannot_have_are_refused_with_the_reason() -> None:
    q = DraftProbs(torch.full((2, 4), 0.25))
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
        UserError,
        match=r"looked at the values drawn.*these fit: point_mass, self_selection, gumbel$",
    ):
        check_proposal(surest, "hybrid", 1.0)
    assert check_proposal(replace(surest, state_only=True), "hybrid", 1.0).name == "hybrid"
    assert check_proposal(siblings, "traversal", 1.0).name == "traversal"
