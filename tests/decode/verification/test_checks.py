"""The checks on a tiny pair: each classic bug is seen by the check it belongs to, and a right pair passes."""

from dataclasses import replace

import pytest
import torch

from decode.engine.loop import EagerEngine
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.settings import Sampling
from decode.verification import end_to_end, rules
from decode.verification.batches import Asked, RequestBatch
from decode.verification.proposals import every_outcome, judge
from decode.verification.reference import Reference
from decode.verification.run import VerificationRun
from decode.verification.verdict import Tally
from specalign.lm.model import Target
from tests.contract.test_planted import PROMPTS, decoder, fresh, run

__all__ = ["fresh", "run"]


SAMPLED = (
    Sampling(0.7, seed=1),
    Sampling(1.3, top_k=6, seed=2),
    Sampling(1.0, min_p=0.3, seed=3),
    Sampling(1.0, top_p=0.6, repetition_penalty=1.6, seed=4),
    Sampling(1.0, presence_penalty=1.5, banned=(17,), seed=5),
)


def batch(
    target: Target, kind: str, settings: tuple[Sampling, ...] = SAMPLED, new: int = 14
) -> RequestBatch:
    asked = [Asked(tuple(PROMPTS[i % 3]), one, new - i) for i, one in enumerate(settings)]
    return RequestBatch(kind, decoder(target, kind), tuple(asked), 3)


def checked(run: VerificationRun, one: RequestBatch) -> dict[str, list[str]]:
    run.check(one)
    return {
        name: [f.what for f in tally.findings]
        for name, tally in run.tallies.items()
        if tally.findings
    }


@pytest.mark.parametrize(
    "kind",
    ["token", "block", "tree", "drawn tree", "lookup", "left_to_right", "confidence", "random"],
)
def test_a_right_pair_passes(run: VerificationRun, kind: str) -> None:
    one = batch(run.target, kind)
    if kind == "token":  # its drafts are fewer in some rounds
        one.decoder.run_rounds = EagerEngine(paced=True).run_rounds
    assert checked(run, replace(one, adapt=kind == "token")) == {}
    assert run.tallies["rows"].counts["logits of a node"] > 20
    assert run.tallies["randomness"].counts["outcomes of rounds"] > 20


@pytest.mark.parametrize(("kind", "adapt"), [("block", False), ("token", True)])
def test_ends_and_penalties_within_accepted_paths_pass(
    run: VerificationRun, kind: str, adapt: bool
) -> None:
    requests = run.requests
    requests.letters = [90, 40]
    asked = (*requests.ends_of_letters(), *requests.of_few_tokens(1))
    made = decoder(run.target, kind)
    made.run_rounds = EagerEngine(paced=adapt).run_rounds
    assert checked(run, RequestBatch(kind, made, asked, adapt=adapt)) == {}
    assert run.tallies["commit"].counts["ended by eos"] > 8


@pytest.mark.slow
def test_right_rules_pass() -> None:
    tally = Tally("rule")
    rules.check_rules(tally)
    assert not tally.findings and tally.counts["outcomes at a border"] > 1000


@pytest.mark.parametrize(
    "kind",
    [  # the slow ones: block and specdiff in test_end_to_end.py, block and confidence here
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("token", "left_to_right")),
        *("block", "tree", "drawn pair", "lookup", "confidence"),
    ],
)
def test_the_joint_law(run: VerificationRun, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every processor; without, and of longer texts: test_end_to_end.py."""
    monkeypatch.setattr(end_to_end, "LENGTH", 3)
    tally, reference = Tally("end_to_end"), Reference(run.target, run.reference.model)
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.9}
    others = {"min_p": 0.05, "banned": (17,), "min_new_tokens": 2}
    sampling = Sampling(1.2, top_k=2, seed=1, **penalties, **others)
    end_to_end.check_joint_law(
        kind, decoder(run.target, kind), PROMPTS[0], reference, tally, sampling
    )
    assert not tally.findings and tally.largest, tally


# ---- what is reported of a draw ----


def test_a_draft_dropped_by_its_own_value_is_seen() -> None:
    q_1V = torch.tensor([[0.3, 0.7]])
    whole = [
        (0.3, Proposal(torch.tensor([0]), "causal", DraftProbs(q_1V))),
        (0.7, Proposal(torch.tensor([1]), "causal", DraftProbs(q_1V))),
    ]
    tally = Tally("proposals")
    judge(whole, tally, "whole")
    assert not tally.findings
    judge([(0.3, None), whole[1]], tally, "dropped")
    assert tally.findings


def test_every_outcome_has_its_probability() -> None:
    from decode.speculation.sampling import draw

    generator, p_V = torch.Generator(), torch.tensor([0.2, 0.0, 0.8])
    found = every_outcome(lambda: (int(draw(p_V, generator)), int(draw(p_V, generator))), 9)
    assert {x: round(w, 6) for w, x in found} == {
        (0, 0): 0.04,
        (0, 2): 0.16,
        (2, 0): 0.16,
        (2, 2): 0.64,
    }
