"""The tokens a call that enumeration expects are those that the decoder counts: the same tables behind the real engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Decoder, Sampling
from decode.proposers.base import Request
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings
from decode.speculation.rules import Outcomes
from decode.speculation.tree import chain, depths
from decode.speculation.tree_drafts import draw_tree
from decode.speculation.verifiers import VERIFIERS, Verdict, resolve
from decode.verification.enumeration import DRAFTERS, KINDS, Parents, RuleCase, Toy, drawn, pairs
from tests.contract.enumeration import DOMINATES, mean_accepted, trees_for
from tests.fakes import ScriptedDrafter, TableTarget, sampled

RUNS = 800
PROMPT = [0]
"""The prompt and the token that it is answered with stand before the tables' own first token."""


class ToyTarget(TableTarget):
    """p of a `Toy` behind two tokens; what follows its last table is uniform."""

    def __init__(self, toy: Toy) -> None:
        super().__init__(toy.V)
        self.toy = toy
        self.paths: list[list[int]] = []

    def hidden(self, paths: list[list[int]]) -> Tensor:
        """The places of the latest forward."""
        self.paths = paths
        return torch.arange(len(paths))[:, None]

    def head(self, hidden: Tensor) -> Tensor:
        return torch.stack([self._row(self.paths[int(i)][2:]) for i in hidden[0, :, 0]])[
            None
        ].float()

    def _row(self, done: list[int]) -> Tensor:
        if len(done) > self.toy.K:
            return torch.zeros(self.toy.V, dtype=torch.float64)
        return self.toy.p[len(done)][tuple(done)].clamp_min(1e-30).log()


def drafts_of(toy: Toy, parents: Parents, causal: bool, siblings: Siblings) -> Any:
    """The drafter that enumeration calls `drawn`."""

    def propose(request: Request, k: int) -> Proposal | None:
        if len(request.tokens) != 2:
            return None

        def q_of(level: int, above_P: Tensor) -> Tensor:
            if not causal:
                return toy.q_KV[level].expand(len(above_P), -1)
            return torch.stack([toy.q[level][(a,) * level] for a in above_P.tolist()])

        law: Law = "causal" if causal else "independent"
        found = draw_tree(parents, law, q_of, siblings, request.generator)
        assert found.q is not None
        return replace(found, q=DraftProbs(found.q.probs.float()))

    return propose


def proposals_of(case_: RuleCase, drafter: str) -> list[Proposal]:
    """Every draft of a case, as a drafter of that law hands it over."""
    drafts, (law, _, how) = case_.drafts, drafter.partition(", ")
    found = []
    for b, parents in enumerate(drafts.parents):
        branches = law != "point" and len(set(parents)) < len(parents)
        n = len(parents)
        found.append(
            Proposal(
                drafts.tokens_BN[b, :n],
                law,  # type: ignore[arg-type]
                None if drafts.q_BNV is None else DraftProbs(drafts.q_BNV[b, :n].float()),
                None if drafts.steps_BN is None else drafts.steps_BN[b, :n],
                None if parents == chain(n) else parents,
                KINDS.get(how, "iid") if branches else None,  # type: ignore[arg-type]
                state_only=law == "unmasked",
            )
        )
    return found


def decoder_for(toy: Toy, law: str, parents: Parents, verifier: str, propose: Any) -> Decoder:
    drafter = ScriptedDrafter(law, propose, toy.K)  # type: ignore[arg-type]
    drafter.draft_nodes = len(parents)
    return Decoder(ToyTarget(toy), drafter, verifier)  # type: ignore[arg-type]


def counted(toy: Toy, proposal: Proposal, verifier: str, parents: Parents) -> int:
    """Drafted tokens that the engine commits in its first call."""

    def propose(request: Request, k: int) -> Proposal | None:
        return proposal if len(request.tokens) == 2 else None

    sampling = Sampling(0.0 if VERIFIERS[verifier].greedy_only else 1.0)
    decoder = decoder_for(toy, proposal.law, parents, verifier, propose)
    return decoder.generate(PROMPT, max_new_tokens=toy.K + 2, sampling=sampling).accepted[0]


def cases_of(verifier: str, drafter: str) -> list[tuple[Toy, Parents, RuleCase]]:
    """Two tables for each of two shapes."""
    shapes = [
        x
        for x in [(-1, 0), (-1, 0, 1), (-1, -1, 0), (-1, -1, 1)]
        if x in trees_for(verifier, drafter)
    ]
    found = []
    for seed, parents in enumerate([*shapes[-2:]] * 2, 1):
        toy = Toy(3, max(depths(parents)), seed, VERIFIERS[verifier].greedy_only)
        found.append((toy, parents, DRAFTERS[drafter](toy, parents)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "drafter"), [x for x in pairs() if x[0] != "point_mass"])
def test_every_draft_through_the_engine(
    verifier: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not drawn but gone through: each draft at its weight, what the engine may count at its probability, and what it counts
    is what was drawn. (`point_mass` draws the target's own tokens: below.)"""
    seen: list[tuple[Tensor, int]] = []

    def watched(outcomes: Outcomes, p_BMV: Tensor, u_B2: Tensor) -> Verdict:
        verdict = resolve(outcomes, p_BMV, u_B2)
        seen.append((outcomes.stop_BM[0], int(verdict.end_B)))
        return verdict

    monkeypatch.setattr("decode.speculation.verifiers.resolve", watched)
    monkeypatch.setattr("decode.speculation.verifiers._chains_in_c", lambda *_: None)
    for toy, parents, case in cases_of(verifier, drafter):
        expected = 0.0
        for weight, proposal in zip(
            case.weight_B.tolist(), proposals_of(case, drafter), strict=True
        ):
            seen.clear()
            count = counted(toy, proposal, verifier, parents)
            if VERIFIERS[verifier].greedy_only:
                expected += weight * count
                continue
            depth_M = torch.tensor(
                [0, *depths(proposal.parents or chain(len(proposal)))], dtype=torch.float64
            )
            stop_M, end = seen[0]
            assert count == int(depth_M[end])
            expected += weight * float(stop_M.double() @ depth_M)
        assert expected == pytest.approx(mean_accepted(case, verifier), abs=2e-6)


def test_one_rule_in_anothers_place_would_show() -> None:
    for better, other, drafter in DOMINATES:
        gaps = [
            mean_accepted(c, better) - mean_accepted(c, other)
            for _, _, c in cases_of(better, drafter)
        ]
        assert max(map(abs, gaps)) > 1e-3, (better, other, drafter)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "parents", "causal", "siblings"),
    [
        ("point_mass", (-1, 0), False, "iid"),
        ("point_mass", (-1, -1, 0), True, "without_replacement"),
        ("block", (-1, 0), True, "iid"),
    ],
)
def test_drawn_and_counted(
    verifier: str, parents: Parents, causal: bool, siblings: Siblings
) -> None:
    for seed in (1, 2):
        toy = Toy(4, max(depths(parents)), seed)
        expected = mean_accepted(drawn(toy, parents, causal, siblings), verifier)
        propose = drafts_of(toy, parents, causal, siblings)
        decoder = decoder_for(
            toy, "causal" if causal else "independent", parents, verifier, propose
        )
        outputs = sampled(decoder, Sampling(1.0), RUNS, PROMPT, toy.K + 2)
        counts = torch.tensor([out.accepted[0] for out in outputs], dtype=torch.float64)
        error = float(counts.std()) / RUNS**0.5
        assert abs(float(counts.mean()) - expected) < 4.5 * error + 1e-3, (
            seed,
            expected,
            counts.mean(),
        )
