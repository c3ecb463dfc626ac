"""The tokens a call that enumeration expects are those that the decoder counts: the same tables behind the real engine."""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Decoder, Sampling
from decode.proposers.base import Request
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.rules import Outcomes
from decode.speculation.tree import chain, depths
from decode.speculation.verifiers import VERIFIERS, Verdict, resolve
from decode.verification.enumeration import DRAFTERS, KINDS, Parents, RuleCase, Toy, pairs
from tests.contract.enumeration import mean_accepted, trees_for
from tests.fakes import ScriptedDrafter, TableTarget

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
        rows = [self._row(self.paths[int(i)][2:]) for i in hidden[0, :, 0]]
        return torch.stack(rows)[None].float()

    def _row(self, done: list[int]) -> Tensor:
        if len(done) > self.toy.K:
            return torch.zeros(self.toy.V, dtype=torch.float64)
        return self.toy.p[len(done)][tuple(done)].clamp_min(1e-30).log()


def proposals_of(case_: RuleCase, drafter: str) -> list[Proposal]:
    """Every draft of a case, as a drafter of that law hands it over."""
    drafts, (law, _, how) = case_.drafts, drafter.partition(", ")
    found = []
    for b, parents in enumerate(drafts.parents):
        n, branches = len(parents), law != "point" and len(set(parents)) < len(parents)
        q = None if drafts.q_BNV is None else DraftProbs(drafts.q_BNV[b, :n].float())
        steps_K = None if drafts.steps_BN is None else drafts.steps_BN[b, :n]
        shape: dict[str, Any] = {"parents": None if parents == chain(n) else parents}
        shape |= {"siblings": KINDS.get(how, "iid") if branches else None}
        shape |= {"state_only": law == "unmasked"}
        found.append(Proposal(drafts.tokens_BN[b, :n], law, q, steps_K, **shape))  # type: ignore[arg-type]
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
    trees = trees_for(verifier, drafter)
    shapes = [x for x in [(-1, 0), (-1, 0, 1), (-1, -1, 0), (-1, -1, 1)] if x in trees]
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
        proposals = proposals_of(case, drafter)
        for weight, proposal in zip(case.weight_B.tolist(), proposals, strict=True):
            seen.clear()
            count = counted(toy, proposal, verifier, parents)
            if VERIFIERS[verifier].greedy_only:
                expected += weight * count
                continue
            depth_M = torch.tensor([0.0, *depths(proposal.tree)], dtype=torch.float64)
            stop_M, end = seen[0]
            assert count == int(depth_M[end])
            expected += weight * float(stop_M.double() @ depth_M)
        assert expected == pytest.approx(mean_accepted(case, verifier), abs=2e-6)
