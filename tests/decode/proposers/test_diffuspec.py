"""DiffuSpec in the engine: the length by hand, the path against its parts, and that the output stays the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from decode import Decoder, Sampling
from decode.engine.engine import Engine
from decode.proposers import diffuspec
from decode.proposers.adaptive import AdaptiveLength
from decode.proposers.diffuspec import (
    DiffuSpecDrafter,
    DiffuSpecSession,
    NgramModel,
    find_best_path,
    find_candidates,
)
from decode.speculation.sampling import probs
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.diffusion_context import DiffusionContext
from tests.builders import PROMPT, VARIED
from tests.builders import diffusion_drafter as drafter


def made(
    target: Target, kind: str = "ddit", draft_tokens: int = 6, **options: Any
) -> DiffuSpecDrafter:
    return DiffuSpecDrafter(drafter(target, kind), draft_tokens, **options)


def informed(target: Target, prompt: list[int], length: int, **options: Any) -> DiffuSpecDrafter:
    """Its n-gram model has read the target's next tokens and leads: drafts that are accepted."""
    written = Decoder(target).generate(prompt, max_new_tokens=length).tokens
    corpus = [[*prompt, *written]] * 50
    return made(target, corpus=corpus, **options)


@pytest.fixture
def leading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-gram model chooses, among all tokens."""
    for name, value in (("WEIGHT", 0.01), ("MASS", 1.0), ("CANDIDATES", 1000)):
        monkeypatch.setattr(diffuspec, name, value)


def begun(target: Target, proposer: DiffuSpecDrafter, sampling: Sampling) -> DiffuSpecSession:
    """A request after its first token."""
    engine = Engine(
        target, PROMPT, 40, sampling, proposer, "point_mass" if sampling.temperature else "greedy"
    )
    with torch.no_grad():
        engine.begin()
    assert isinstance(engine.session, DiffuSpecSession)
    return engine.session


def test_the_length_by_hand() -> None:
    length = AdaptiveLength(30)
    assert length.tokens == 30
    for generated, accepted, means, tokens in (
        (30, 30, (15, 15), 25),  # 15 + 10
        (25, 5, (20, 10), 20),
        (20, 20, (20, 15), 20),
        (28, 4, (24, 9.5), 24),
        (24, 24, (24, 16.75), 24),
        (0, 0, (12, 8.375), 20),  # 12 is below
    ):
        length.update(generated, accepted)
        assert (length.generated, length.accepted) == means and length.tokens == tokens
    small = AdaptiveLength(3)
    small.update(0, 0)
    assert small.tokens == 2


@pytest.mark.parametrize("place", [0, 3, 6, 9])
def test_a_draft_ends_at_the_end_of_sequence(target: Target, place: int, leading: None) -> None:
    """First of the output; within a draft, its last, within the second draft."""
    written = Decoder(target).generate(PROMPT, max_new_tokens=30).tokens
    other = load_target("debug", dtype="float32", device="cpu")
    other.eos_ids = ()
    proposer = informed(other, PROMPT, 30)
    other.eos_ids = (written[place], 250)
    out = Decoder(other, proposer).generate(PROMPT, max_new_tokens=30)
    assert out.finish == "eos" and out.tokens == written[: place + 1]
    if place:
        assert sum(out.accepted) == place - (place > 6) and out.drafted[-1] == out.accepted[-1]


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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_the_target_may_not_say_is_not_drafted(
    target: Target, temperature: float, leading: None
) -> None:
    end = target.eos_ids[0]

    def path(sampling: Sampling, **options: Any) -> list[int]:
        session = begun(target, made(target, **options), sampling)
        with torch.no_grad():
            return session.propose(6).tokens_K.tolist()

    free = path(Sampling(temperature))
    assert not set(path(Sampling(temperature, banned=tuple(free)))) & set(free)
    # where the n-gram model says so, it ends at once, unless it may not
    corpus = [[end] * 500]
    assert path(Sampling(temperature), corpus=corpus) == [end]
    assert end not in path(Sampling(temperature, min_new_tokens=3), corpus=corpus)[:2]
