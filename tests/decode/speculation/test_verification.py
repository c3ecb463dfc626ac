"""One round: what is accepted, the token after it, and what is refused. Distributions: tests/contract."""

from __future__ import annotations

import pytest
import torch

from align.common.errors import UserError
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.sampling import ProcessorState, Sampling, position_noise
from decode.speculation.verification import outcome_of, verify_proposal

SAID = torch.eye(5)[[2, 4, 0, 1]] * 9.0
"""Logits after the last committed token and after each of three drafts: the target says 2, 4, 0, 1."""
NOTHING = ProcessorState()
GREEDY, WARM = Sampling(), Sampling(1.0)


def outcome(proposal: Proposal, verifier: str = "greedy", sampling: Sampling = GREEDY, **more: object):  # type: ignore[no-untyped-def]
    logits = SAID[: len(proposal) + 1].clone()
    return verify_proposal(
        logits, proposal, verifier, sampling, NOTHING, torch.Generator().manual_seed(0), **more
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "accepted", "following"),
    [([2, 4, 0], [2, 4, 0], 1), ([2, 4, 3], [2, 4], 0), ([2, 3, 0], [2], 4), ([1, 4, 0], [], 2), ([], [], 2)],
)
def test_greedy_accepts_what_the_target_would_have_said(
    tokens: list[int], accepted: list[int], following: int
) -> None:
    found = outcome(Proposal(torch.tensor(tokens, dtype=torch.int64), "point"))
    assert (found.accepted, found.following, found.path) == (accepted, following, list(range(len(accepted))))
    assert found.rows == list(range(len(accepted) + 1))


def test_a_branch_off_the_first_is_followed() -> None:
    found = outcome(Proposal(torch.tensor([3, 2, 0]), "point", parents=(-1, -1, 1)))
    assert (found.accepted, found.path, found.rows, found.following) == ([2, 0], [1, 2], [0, 2, 3], 1)


def test_coupled_tokens_are_those_of_their_positions() -> None:
    """Whatever is drafted: the token at a position is what its noise makes of p."""

    def noise(at: int) -> torch.Tensor:
        return position_noise(7, at, 5, torch.device("cpu"))

    said = [int((SAID[i].log_softmax(-1) + noise(20 + i)).argmax()) for i in range(3)]
    found = outcome(Proposal(torch.tensor(said[:2]), "point"), "gumbel", WARM, noise=noise, position=20)
    assert [*found.accepted, found.following] == said
    wrong = outcome(
        Proposal(torch.tensor([(said[0] + 1) % 5]), "point"), "gumbel", WARM, noise=noise, position=20
    )
    assert (wrong.accepted, wrong.following) == ([], said[0])


def test_a_verifier_that_is_not_exact_for_the_drafts_is_refused() -> None:
    with pytest.raises(UserError, match="token"):
        outcome(Proposal(torch.tensor([2]), "point"), "token", WARM)


def test_a_q_that_is_no_distribution_is_seen_with_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where looking at it before the round's one transfer would synchronise."""
    monkeypatch.setattr("decode.speculation.proposal.SEEN_AT_ONCE", frozenset())
    proposal = Proposal(torch.tensor([2]), "independent", DraftProbs(torch.full((1, 5), 0.1)))
    with pytest.raises(ValueError, match="distribution"):
        outcome_of(proposal, torch.tensor([0]), torch.tensor([1]))
