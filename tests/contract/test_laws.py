"""Losslessness, enumerated: every verifier with every law of drafts that the types let it have, over every tree of up to
six nodes and three levels, gives EXACTLY the target's joint law; and the ways to get it wrong are seen."""

from functools import partial

import pytest
import torch
from torch import Tensor

from decode.speculation import rules
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.rules import Drafts, Rule
from decode.speculation.tree import chain, depths, path_to, walk
from decode.speculation.verifiers import VERIFIERS, find, run_verifier
from decode.verification.enumeration import (
    DRAFTERS,
    EXACT,
    RuleCase,
    Toy,
    case,
    distance,
    drawn,
    every,
    outcomes,
    pairs,
)
from tests.contract.enumeration import DOMINATES, WRONG, cases, mean_accepted, shapes, trees_for
from tests.contract.mutants import MUTANTS


@pytest.mark.parametrize(
    ("verifier", "drafter"),
    [
        pytest.param(*pair, marks=[] if pair[0] in ("token", "block") else [pytest.mark.slow])
        for pair in pairs()
    ],
)
def test_the_output_law_is_the_targets(verifier: str, drafter: str) -> None:
    found = cases(verifier, drafter, 240)  # a table for each tree
    assert len(found) >= 240 and max(distance(x, verifier) for x in found) < EXACT
    for better, other, drafts in DOMINATES:
        if (better, drafts) == (verifier, drafter):
            check_gains(found, better, other)


def check_gains(found: list[RuleCase], better: str, other: str) -> None:
    """Block never accepts fewer than token. Traversal accepts more than recursive rejection on most tables and in the
    mean, but not on all: where it gains by an early leaf a later sibling may pay for it (tests/contract/README.md)."""
    gains = torch.tensor([mean_accepted(x, better) - mean_accepted(x, other) for x in found])
    assert float(gains.mean()) > 0.002 and (gains > 1e-6).sum() > 20
    if better == "block":
        assert bool((gains > -EXACT).all())
    else:
        assert float(gains.min()) > -0.1 and float((gains > -EXACT).double().mean()) > 0.95


@pytest.mark.parametrize(("verifier", "drafter"), pairs())
def test_the_output_law_on_a_few_trees(verifier: str, drafter: str) -> None:
    """What `test_the_output_law_is_the_targets` enumerates over every tree, in a fiftieth of the time."""
    trees = trees_for(verifier, drafter)
    few = [x for x in trees if len(x) <= 3 or x in ((-1, 0, -1, 2), (-1, -1, 1, 0))]
    few += [x for x in trees if x == (-1,) * 4] * 3
    for seed, parents in enumerate(few):
        V = max(3, 1 + parents.count(-1))  # without replacement one is left after all siblings
        toy = Toy(V, max(depths(parents)), seed + 1, VERIFIERS[verifier].greedy_only)
        assert distance(DRAFTERS[drafter](toy, parents), verifier) < EXACT


def test_k_seq_accepts_as_often_as_its_equation_allows() -> None:
    """ρ solves 1 − (1 − β)^S = ρβ: a larger one would keep the distribution and accept less."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2, 10, 3, 5, dtype=torch.float64, generator=generator) ** 3
    p_BNV, q_BNV = weights / weights.sum(-1, keepdim=True)
    siblings_BN = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).expand(10, 3)
    rho_BN, beta_BN = rules._inflation(p_BNV, q_BNV, siblings_BN)
    accepted_BN = 1 - (1 - beta_BN) ** siblings_BN
    torch.testing.assert_close(accepted_BN, rho_BN * beta_BN, atol=1e-9, rtol=0)
    torch.testing.assert_close(beta_BN, torch.minimum(q_BNV, p_BNV / rho_BN[..., None]).sum(-1))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name: str) -> None:
    assert max(MUTANTS[name].distances()) > WRONG


def test_every_exact_verifier_is_enumerated() -> None:
    exact = {v.name for v in VERIFIERS.values() if not v.lossy and v.rule is not None}
    assert {verifier for verifier, _ in pairs()} == exact
    assert {drafter for _, drafter in pairs()} == set(DRAFTERS)
    assert all(("lossy" in v.name) == v.lossy for v in VERIFIERS.values())


@pytest.mark.parametrize(
    "verifier", ["token", "block", "hybrid", "recursive", "traversal", "k_seq"]
)
@pytest.mark.parametrize("part", [False, True])
def test_a_q_that_is_no_number_costs_speed_and_not_the_law(verifier: str, part: bool) -> None:
    """At some positions, in the whole row or in part of it; the tokens there are whatever comes out then."""
    for parents in ((-1,), (-1, 0), (-1, 0, 1), (-1, -1, 0)):
        if parents == (-1, -1, 0) and not VERIFIERS[verifier].siblings:
            continue
        for seed in range(10):
            toy = Toy(3, max(depths(parents)), seed)
            q_KV = toy.q_KV.clone()
            for k in range(toy.K):
                if (seed + k) % 2:
                    q_KV[k, : 1 if part else 3] = float("nan")
            drawn_KV = torch.where(q_KV.isnan().any(1, True), torch.eye(3).double()[2], q_KV)
            tokens = every(3, len(parents))
            weight = torch.ones(len(tokens), dtype=torch.float64)
            for i, depth in enumerate(depths(parents)):
                weight = weight * drawn_KV[depth - 1][tokens[:, i]]
            q_BNV = q_KV[torch.tensor(depths(parents)) - 1].expand(len(tokens), -1, 3)
            assert distance(case(toy, parents, weight, tokens, q_BNV), verifier) < EXACT


def test_a_pruned_draft_vocabulary() -> None:
    """q over all tokens but token 0, its ids out of order: p has mass outside."""
    for verifier in ("token", "block"):
        for seed in range(20):
            toy = Toy(4, 2, seed)
            ids = torch.tensor([3, 1, 2])
            q_KS = toy.q_KV[:, ids] + 0.01
            q = DraftProbs(q_KS / q_KS.sum(1, keepdim=True), ids)
            tokens = every(4, 2)
            dense = q.dense(4)
            weight = dense[0][tokens[:, 0]] * dense[1][tokens[:, 1]]
            found = case(toy, (-1, 0), weight, tokens, dense.expand(16, 2, 4))
            assert distance(found, verifier) < EXACT
            proposal = Proposal(torch.tensor([3, 2]), "independent", q)
            assert torch.equal(Drafts.of([proposal], 4).q_BNV, dense[None])


def test_cutting_a_draft_keeps_its_law() -> None:
    for drafter in ("independent, i.i.d. siblings", "causal, without replacement"):
        for parents in ((-1, 0, 1), (-1, -1, 0, 1, 2)):
            whole, law = DRAFTERS[drafter](Toy(2, 3, 7), parents), drafter.partition(",")[0]
            kind = None
            if len(set(parents)) < len(parents):
                kind = "without_replacement" if whole.drafts.without_replacement else "iid"
            cut = [
                Proposal(t, law, DraftProbs(q), parents=parents, siblings=kind).cut(2)
                for t, q in zip(whole.drafts.tokens_BN, whole.drafts.q_BNV, strict=True)
            ]
            drafts = Drafts.of(cut, 2)
            found = case(
                whole.toy, cut[0].parents, whole.weight_B, drafts.tokens_BN, drafts.q_BNV, drafts.without_replacement
            )  # fmt: skip
            assert distance(found, "traversal") < EXACT


def test_out_of_order_unmasking_needs_point_mass_or_hybrid() -> None:
    """The worked example of the field guide: two binary tokens, a drafter whose joint equals the target's, which unmasks
    the second first."""
    toy = Toy(2, 2, 1)
    stay = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    half = torch.full((2,), 0.5, dtype=torch.float64)
    toy.p = [half, stay, torch.full((2, 2, 2), 0.5, dtype=torch.float64)]
    tokens = every(2, 2)
    weight = 0.5 * stay[tokens[:, 1], tokens[:, 0]]
    steps = torch.tensor([[1, 0]]).expand(4, 2)

    def drafts(first_BV: Tensor):
        q_BNV = torch.stack([first_BV, half.expand(4, 2)], 1)
        return case(toy, (-1, 0), weight, tokens, q_BNV, steps_BN=steps)

    own = drafts(stay[tokens[:, 1]])
    assert distance(own, "token") == pytest.approx(0.040, abs=5e-4)
    assert distance(drafts(half.expand(4, 2)), "token") == pytest.approx(0.080, abs=5e-4)
    assert distance(own, "point_mass") < EXACT and distance(own, "hybrid") < EXACT


# ---- rules that are each other ----


def test_traversal_on_a_chain_is_block_verification() -> None:
    """Against the formulas of arXiv 2403.10444, written down one after the other."""
    for seed in range(40):
        toy = Toy(3, 3, seed)
        found = drawn(toy, (-1, 0, 1), causal=True)
        out = outcomes(found, "block")
        for b, x in enumerate(found.drafts.tokens_BN.tolist()):
            p, q = found.p_BMV[b], found.drafts.q_BNV[b]
            joint, h = [1.0], []
            for i in range(3):
                joint.append(min(1.0, joint[-1] * float(p[i, x[i]] / q[i, x[i]])))
            for i in range(1, 4):
                mass = float((joint[i] * p[i] - q[i]).clamp(min=0).sum()) if i < 3 else 0.0
                below = mass + 1 - joint[i]
                h.append(joint[3] if i == 3 else mass / below if below > 0 else 1.0)
            stop, left = [0.0] * 4, 1.0
            for i in (3, 2, 1):
                stop[i], left = left * h[i - 1], left * (1 - h[i - 1])
            stop[0] = left
            assert out.stop_BM[b].tolist() == pytest.approx(stop, abs=1e-9)


@pytest.mark.parametrize(
    ("quick", "slow"), [(rules.token, rules.recursive), (rules.block, rules.traversal)]
)
def test_chains_all_positions_at_once(quick: Rule, slow: Rule) -> None:
    """The rules for trees, which are enumerated as well, on the same chains; ragged ones too, and a q that is no number."""
    for seed in range(60):
        found = drawn(Toy(3, 3, seed), chain(3), causal=True)
        q_BNV, forest = found.drafts.q_BNV, found.drafts.parents
        assert q_BNV is not None
        if seed % 3 == 1:
            forest = tuple(chain(b % 4) for b in range(len(forest)))
        if seed % 3 == 2:
            q_BNV = q_BNV.clone()
            q_BNV[::2, seed % 2 + 1] = float("nan")
        drafts = Drafts(found.drafts.tokens_BN, forest, q_BNV)
        one, other = quick(found.p_BMV, drafts), slow(found.p_BMV, drafts)
        torch.testing.assert_close(one.stop_BM, other.stop_BM, atol=1e-12, rtol=0)
        ends = one.stop_BM > 1e-12
        rests = (out.rest_BMV / out.rest_BMV.sum(-1, keepdim=True) for out in (one, other))
        torch.testing.assert_close(*(rest[ends] for rest in rests))


@pytest.mark.parametrize("name", [n for n, v in VERIFIERS.items() if v.rule is not None])
def test_a_batch_of_different_trees_is_each_alone(name: str) -> None:
    """Ragged: other shapes and sizes side by side, an empty one and broken q among them, change nothing for any."""
    verifier = VERIFIERS[name]
    trees = [x for x in shapes(5) if x == chain(len(x)) or verifier.siblings]
    generator = torch.Generator().manual_seed(0)
    proposals, tables = [], []
    for i, parents in enumerate(trees):
        toy = Toy(4, 3, i)
        tokens = torch.randint(4, (len(parents),), generator=generator)
        q_NV = toy.q_KV[torch.tensor(depths(parents)) - 1] * 0.9 + 0.025
        if i % 4 == 2:
            q_NV[torch.tensor(depths(parents)) == 1 + i % 2] = float("nan")
        q = DraftProbs(q_NV)
        kind = "iid" if len(set(parents)) < len(parents) else None
        proposals.append(Proposal(tokens, "causal", q, parents=parents, siblings=kind))
        tables.append(toy.p_BMV(tokens[None], parents)[0])
    none = DraftProbs(torch.zeros(0, 4).double())
    proposals.append(Proposal(torch.zeros(0, dtype=torch.int64), "causal", none))
    tables.append(Toy(4, 3, 99).p[0][None])
    most = max(len(p) for p in tables)
    p_BMV = torch.full((len(tables), most, 4), 0.25, dtype=torch.float64)
    for b, p in enumerate(tables):
        p_BMV[b, : len(p)] = p
    together = verifier.rule(p_BMV.mT.contiguous().mT, Drafts.of(proposals, 4))
    for b, (proposal, p) in enumerate(zip(proposals, tables, strict=True)):
        alone = verifier.rule(p[None], Drafts.of([proposal], 4))
        torch.testing.assert_close(together.stop_BM[b, : len(p)], alone.stop_BM[0])
        ends = (alone.stop_BM[0] > 1e-12).nonzero()[:, 0]
        rests = (rest[ends] for rest in (together.rest_BMV[b], alone.rest_BMV[0]))
        torch.testing.assert_close(*(rest / rest.sum(-1, keepdim=True) for rest in rests))
        assert float(together.stop_BM[b, len(p) :].sum()) == 0
        assert float(alone.stop_BM.sum()) == pytest.approx(1.0)
    seeds = [torch.Generator().manual_seed(i) for i in range(len(proposals))]
    verdict = run_verifier(name, proposals, p_BMV, seeds)
    for b, (proposal, p) in enumerate(zip(proposals, tables, strict=True)):
        one = run_verifier(name, [proposal], p[None], [torch.Generator().manual_seed(b)])
        assert int(one.end_B) == int(verdict.end_B[b]) and int(one.next_B) == int(verdict.next_B[b])


# ---- draws follow the two tensors ----


def test_the_greedy_rule_is_point_mass_on_a_one_hot_p() -> None:
    for seed in range(30):
        toy = Toy(3, 3, seed, greedy=True)
        tokens = torch.randint(3, (1, 5), generator=torch.Generator().manual_seed(seed))
        parents = (-1, 0, -1, 2, 2)
        p_BMV = toy.p_BMV(tokens, parents)
        drafts = Drafts(tokens, (parents,))
        out = find("greedy").rule(p_BMV, drafts)
        end = int(out.stop_BM[0].argmax())
        best = p_BMV[0].argmax(-1).tolist()
        choose = partial(lambda best, at: [best[i] for _, i in at], best)
        ((path, said),) = walk(tokens.tolist(), [parents], choose)
        assert out.stop_BM[0, end] == 1 and path == path_to(parents, end)
        assert said == int(out.rest_BMV[0, end].argmax())
