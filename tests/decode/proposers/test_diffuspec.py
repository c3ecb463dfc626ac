"""DiffuSpec in the engine: the length by hand, the path against its parts, and that the output stays the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from decode import Sampling
from decode.engine.engine import Engine
from decode.proposers.diffuspec import (
    DiffuSpecDrafter,
    DiffuSpecSession,
    NgramModel,
    find_best_path,
    find_candidates,
)
from decode.speculation.sampling import probs
from specalign.lm.model import Target
from specalign.models.diffusion_context import DiffusionContext
from tests.builders import PROMPT, VARIED
from tests.builders import diffusion_drafter as drafter


def made(
    target: Target, kind: str = "ddit", draft_tokens: int = 6, **options: Any
) -> DiffuSpecDrafter:
    return DiffuSpecDrafter(drafter(target, kind), draft_tokens, **options)


def begun(target: Target, proposer: DiffuSpecDrafter, sampling: Sampling) -> DiffuSpecSession:
    """A request after its first token."""
    engine = Engine(
        target, PROMPT, 40, sampling, proposer, "point_mass" if sampling.temperature else "greedy"
    )
    with torch.no_grad():
        engine.begin()
    assert isinstance(engine.session, DiffuSpecSession)
    return engine.session


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.8, top_k=9), replace(VARIED, temperature=0.7, banned=(3, 40))],
)
def test_the_path_is_the_searched_one_of_processed_marginals(
    target: Target, sampling: Sampling
) -> None:
    """Against the parts put together again; without the search each position's most probable token."""
    corpus = [[4, 90, 17, 55, 56] * 3]
    session = begun(target, made(target, corpus=corpus), sampling)
    tokens, network = session.request.tokens, session.drafter
    context = DiffusionContext(network, 60)
    with torch.no_grad():
        context.extend(tokens)
        logits_KV = context.denoise(torch.full((6,), network.mask_id))
        proposal = session.propose(6)
    before = session.request.history.ahead(0, 6)
    q = probs(logits_KV, replace(sampling, temperature=sampling.temperature or 1.0), before)
    reader = NgramModel(target.vocab_size)
    for text in (*corpus, tokens):
        reader.read(text)
    lattice = find_candidates(q, 0.8, 15, target.eos_ids)
    path = find_best_path(
        lattice,
        lambda path, found: reader.log_probs([*tokens, *path], found),
        0.5,
        3,
        target.eos_ids,
    )
    assert proposal is not None and proposal.law == "point" and proposal.q is None
    assert proposal.tokens_K.tolist() == path and len(set(path) & set(sampling.banned)) == 0
    plain = begun(target, made(target, path_search=False), sampling)
    with torch.no_grad():
        argmax = plain.propose(6)
    assert argmax is not None
    expected = q.argmax(-1).tolist()
    ends = [i for i, token in enumerate(expected) if token in target.eos_ids]
    assert argmax.tokens_K.tolist() == expected[: ends[0] + 1 if ends else 6]
