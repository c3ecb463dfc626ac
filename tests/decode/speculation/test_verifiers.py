from dataclasses import replace

import pytest
import torch

from decode.speculation.drafts import Drafts
from decode.speculation.proposal import DraftProbs, Proposal
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
            states = [[x.get_state() for x in generators] for generators in (drawn, other)]
            assert all(map(torch.equal, *states))
            assert torch.equal(found.end_B, expected.end_B)
            assert torch.equal(found.next_B, expected.next_B)
            ends.update(found.end_B.tolist())
        assert len(ends) > 1


def test_auto_always_fits() -> None:
    for law in ("point", "independent", "causal", "unmasked"):
        for temperature in (0.0, 1.0):
            check_pair(law, choose(law, temperature), temperature)
    chosen = [choose(law, 1.0) for law in ("causal", "unmasked", "point")]
    assert chosen == ["traversal", "hybrid", "point_mass"]
    assert choose("causal", 0.0) == "greedy"


@pytest.mark.parametrize(
    ("law", "verifier", "temperature", "says"),
    [
        ("point", "token", 1.0, "'point' drafts at .* 1; .*: point_mass, self_selection, gumbel$"),
        ("unmasked", "token", 1.0, "exact verifiers: point_mass, self_selection, hybrid, gumbel$"),
        ("independent", "greedy", 0.7, "temperature 0.7; .*: point_mass, self_selection, token"),
        ("point", "token", 0.0, "exact verifiers: greedy, point_mass, self_selection, gumbel$"),
        ("point", "tokens", 0.0, r"unknown verifier 'tokens' \(did you mean 'token'"),
    ],
)
def test_inexact_pairs_are_refused(law: str, verifier: str, temperature: float, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_pair(law, verifier, temperature)


def test_proposals_that_a_verifier_does_not_take() -> None:
    q, two = DraftProbs(torch.full((2, 4), 0.25)), torch.tensor([3, 1])
    siblings = Proposal(two, "independent", q, parents=(-1, -1), siblings="without_replacement")
    for name in ("token", "k_seq"):
        with pytest.raises(UserError, match=r"that branch \(siblings drawn: without_replacement"):
            check_proposal(siblings, name, 1.0)
    surest = Proposal(two, "unmasked", q, steps_K=two)
    with pytest.raises(UserError, match=r"looked at drawn values .*: point_mass, self_sel"):
        check_proposal(surest, "hybrid", 1.0)
    assert check_proposal(replace(surest, state_only=True), "hybrid", 1.0).name == "hybrid"
    assert check_proposal(siblings, "traversal", 1.0).name == "traversal"
    p_BMV = torch.full((1, 3, 4), 0.25)
    with pytest.raises(UserError, match="exact verifiers"):
        run_verifier("token", [Proposal(two, "point")], p_BMV, [torch.Generator()])
    with pytest.raises(ValueError, match="fp32 or fp64"):
        run_verifier("traversal", [siblings], p_BMV.half(), [torch.Generator()])
