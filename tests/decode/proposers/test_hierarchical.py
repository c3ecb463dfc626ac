"""Drafts of a drafter that speculates itself: always k, drawn from the middle model, q the rows that verified them."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch

from decode import Decoder, Sampling
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.base import Request
from decode.proposers.hierarchical import HierarchicalProposer
from decode.proposers.lookup import CopyingProposer, LookupProposer
from decode.speculation.history import History
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import probs
from specalign.lm.model import Target
from tests.builders import PROMPTS, watched
from tests.builders import smaller_model as smaller
from tests.fakes import DRAFTERS, LETTERS, SETTINGS, ScriptedDrafter, TableTarget, plausible

TREES = ("branching", "i.i.d. siblings", "without replacement")
INNER: dict[str, Any] = {
    "lookup": lambda: LookupProposer(3),
    "autoregressive": lambda: AutoregressiveProposer(TableTarget(3, seed=7), 2),  # type: ignore[arg-type]
    "copying": lambda: CopyingProposer(AutoregressiveProposer(TableTarget(3, seed=7), 2), 2, 4),  # type: ignore[arg-type]
    "hierarchical": lambda: HierarchicalProposer(TableTarget(3, seed=7), LookupProposer(2), 2),  # type: ignore[arg-type]
} | {
    kind: lambda kind=kind: ScriptedDrafter(*DRAFTERS[kind])
    for kind in DRAFTERS
    if kind not in TREES
}


def tables(kind: str, k: int = 4, seed: int = 9) -> HierarchicalProposer:
    return HierarchicalProposer(TableTarget(3, seed=seed), INNER[kind](), k)  # type: ignore[arg-type]


def request(target: Any, text: list[int], sampling: Sampling) -> Request:
    device = torch.device("cpu")
    history = History(sampling, text, target.vocab_size, (), device)
    generator = torch.Generator().manual_seed(sampling.fixed_seed)
    return Request(target, text, target.new_cache(1, 60), sampling, generator, history)


@pytest.mark.slow
@pytest.mark.parametrize("kind", INNER)
def test_drafts_have_the_middle_models_joint_law(kind: str) -> None:
    """k tokens every time, distributed as the middle model says them by itself; every row of q is its own."""
    middle, penalties = TableTarget(3, seed=9), kind in ("lookup", "autoregressive", "hierarchical")
    sampling = Sampling(1.1, presence_penalty=1.2) if penalties else SETTINGS["plain"]
    session = tables(kind).start(request(TableTarget(3), list(LETTERS), sampling))
    law = middle.law(LETTERS, 4, sampling)
    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(200):
        proposal = session.propose(4)
        assert proposal is not None and proposal.law == "causal" and len(proposal) == 4
        assert proposal.q is not None and proposal.parents is None
        tokens = tuple(proposal.tokens_K.tolist())
        found[tokens] += 1
        chance = proposal.q.dense(3)[range(4), tokens].double().prod()
        assert float(chance) == pytest.approx(law[tokens], rel=1e-4)
    assert plausible(found, law, 200)


# ---- networks ----


@pytest.fixture(scope="module")
def middle(target: Target) -> Target:
    return smaller(target)


def test_q_is_the_middle_models_after_rejections_too(target: Target, middle: Target) -> None:
    """Rows of q against one fresh forward of the middle model over the text and the drafts before each."""
    seen: list[tuple[list[int], Proposal]] = []
    inner = AutoregressiveProposer(smaller(target, 2), 3)
    drafter = watched(HierarchicalProposer(middle, inner, 6), seen)  # type: ignore[arg-type]
    target = copy.copy(target)
    target.eos_ids = ()
    accepted = rejected = 0
    for seed in range(3):
        sampling = Sampling(0.7, top_k=5, seed=seed)
        out = Decoder(target, drafter).generate(PROMPTS[0] * 3, 16, sampling=sampling)
        accepted += sum(out.accepted)
        rejected += sum(out.drafted) - sum(out.accepted)
    assert accepted > 5 and rejected > 5
    for text, proposal in seen:
        tokens = proposal.tokens_K.tolist()
        logits = middle.forward(torch.tensor([[*text, *tokens]])).logits_BLV
        assert logits is not None and proposal.q is not None
        expected = probs(logits[0, len(text) - 1 : -1], Sampling(0.7, top_k=5))
        torch.testing.assert_close(proposal.q.dense(260), expected, atol=1e-5, rtol=1e-3)
