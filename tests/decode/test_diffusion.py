"""Standalone diffusion drafters in the engine: every order and number of steps keeps the target's law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import decode
from align.drafters.standalone import save_standalone
from align.errors import UserError
from align.target import Target, load_target
from decode import Decoder, Sampling
from decode.drafters.copying import CopyingDrafter
from decode.drafters.diffusion import ORDERS, DiffusionProposer
from decode.frequencies import exact_law
from tests.align.test_standalone import KINDS, drafter
from tests.decode.test_block import PROMPT, VARIED
from tests.decode.test_engine_law import plausible


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("steps", "order"), [(1, "left_to_right"), (3, "left_to_right"), (2, "random"), (9, "confidence")]
)
def test_greedy_output_is_plain_decodings(target: Target, kind: str, steps: int, order: str) -> None:
    proposer = DiffusionProposer(drafter(target, kind), 5, steps, order)  # more than its block
    for sampling in (Sampling(), VARIED):
        expected = Decoder(target).generate(PROMPT, max_new_tokens=30, sampling=sampling)
        out = Decoder(target, proposer).generate(PROMPT, max_new_tokens=30, sampling=sampling)
        assert out.tokens == expected.tokens and max(out.drafted) == 5


CASES = [
    ("ddit", 1, "left_to_right", "token"),
    ("ddit", 1, "left_to_right", "block"),
    ("ddit", 2, "left_to_right", "block"),
    ("ddit", 4, "left_to_right", "token"),
    ("ddit", 2, "random", "hybrid"),
    ("ddit", 2, "random", "point_mass"),
    ("ddit", 3, "confidence", "hybrid"),
    ("masked_lm", 1, "left_to_right", "block"),
    ("masked_lm", 2, "left_to_right", "token"),
    ("masked_lm", 2, "confidence", "hybrid"),
    ("masked_lm, full", 2, "random", "hybrid"),
]


@pytest.mark.parametrize(("kind", "steps", "order", "verifier"), CASES)
def test_sampled_output_has_the_targets_joint_law(
    target: Target, kind: str, steps: int, order: str, verifier: str
) -> None:
    runs, sampling = 300, Sampling(1.0, top_k=2)
    decoder = Decoder(target, DiffusionProposer(drafter(target, kind), 4, steps, order), verifier)
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(runs):
        out = decoder.generate(PROMPT, max_new_tokens=4, sampling=replace(sampling, seed=seed))
        found[tuple(out.tokens)] += 1
    assert plausible(found, exact_law(target, PROMPT, 4, sampling), runs)


@pytest.mark.parametrize("order", ORDERS)
def test_q_is_what_each_token_was_drawn_from(target: Target, order: str) -> None:
    """Steps and rows of q against a replay: each step's block is rebuilt from the tokens that earlier steps drew."""
    made = drafter(target, "ddit")
    proposer, sampling = DiffusionProposer(made, 5, 3, order), Sampling(0.9, seed=4)
    from decode.engine import _NOTHING, Engine

    engine = Engine(target, PROMPT, 20, sampling, proposer, "point_mass")
    with torch.no_grad():
        engine._commit(engine._judge(engine._prefill(), _NOTHING))
        session = engine.session
        assert session is not None
        proposal = session.propose(5)
    assert proposal is not None and proposal.q is not None
    steps = proposal.steps_K
    if order == "left_to_right":
        assert proposal.law == "causal" and steps is None
        steps = torch.tensor([0, 0, 1, 1, 2])
    else:
        assert proposal.law == "unmasked" and proposal.state_only and steps is not None
        assert torch.bincount(steps).tolist() == [2, 2, 1]
    for step in range(3):
        block = torch.where(steps < step, proposal.tokens_K, made.mask_id)
        q = (session.context.denoise(block) / 0.9).softmax(-1)  # type: ignore[attr-defined]
        for k in (steps == step).nonzero()[:, 0].tolist():
            torch.testing.assert_close(proposal.q.dense(target.vocab_size)[k], q[k], atol=1e-5, rtol=1e-4)


def test_the_context_follows_the_text(target: Target) -> None:
    """Nothing is run twice but what a shift needs, and the context is the committed text at every round."""
    proposer = DiffusionProposer(drafter(target, "ddit"), 4)
    seen: list[bool] = []
    start = proposer.start

    def watched(request):  # type: ignore[no-untyped-def]
        session = start(request)
        propose = session.propose

        def check(k: int):  # type: ignore[no-untyped-def]
            found = propose(k)
            seen.append(session.context.tokens == request.tokens)
            assert session.context.cache is not None and session.context.cache.length == len(request.tokens)
            return found

        session.propose = check
        return session

    proposer.start = watched  # type: ignore[method-assign]
    Decoder(target, proposer).generate(PROMPT, max_new_tokens=20)
    assert len(seen) > 3 and all(seen)


def test_load_and_options(target: Target, tmp_path: Path) -> None:
    save_standalone(drafter(target, "ddit"), tmp_path / "d")
    expected = Decoder(target).generate(PROMPT, max_new_tokens=20)
    for copying in (False, True):
        decoder = decode.load(target, tmp_path / "d", steps=2, order="confidence", copying=copying)
        assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected.tokens
    with pytest.raises(UserError, match="order='randm' is unknown"):
        decode.load(target, tmp_path / "d", order="randm")
    with pytest.raises(UserError, match="steps=0"):
        decode.load(target, tmp_path / "d", steps=0)
    with pytest.raises(UserError, match="unmasked out of order"):
        decode.load(target, tmp_path / "d", "block", steps=2, order="random").generate(
            PROMPT, max_new_tokens=9, sampling=Sampling(1.0)
        )


@pytest.mark.parametrize("order", ["random", "confidence"])
def test_copies_under_an_unmasked_law(target: Target, order: str) -> None:
    text = [20, 21, 22, 23, 24] * 4
    drafts = CopyingDrafter(DiffusionProposer(drafter(target, "ddit"), 4, 2, order))
    for verifier in ("hybrid", "point_mass"):
        runs, sampling = 200, Sampling(1.0, top_k=2)
        decoder = Decoder(target, drafts, verifier)
        outs = [
            decoder.generate(text, max_new_tokens=4, sampling=replace(sampling, seed=s)) for s in range(runs)
        ]
        found = Counter(tuple(out.tokens) for out in outs)
        assert plausible(found, exact_law(target, text, 4, sampling), runs)


def test_a_vocabulary_of_its_own(target: Target, tmp_path: Path) -> None:
    """A drafter of another tokenizer, by its folder and the tokenizer's: the output stays the target's."""
    from tests.decode.vocabularies import byte_level

    tokenizer = byte_level()
    tokenizer.save_pretrained(str(tmp_path / "t"))
    other = load_target("debug", dtype="float32", device="cpu")
    other.vocab_size = len(tokenizer)
    save_standalone(drafter(other, "ddit"), tmp_path / "d")
    decoder = decode.load(target, tmp_path / "d", drafter_tokenizer=tmp_path / "t")
    assert decoder.name == "diffusion+translation"
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        out = decoder.generate("Say a word or two.", max_new_tokens=30, sampling=sampling)
        assert sum(out.drafted) > 0
        if sampling.greedy:
            assert out.tokens == Decoder(target).generate("Say a word or two.", max_new_tokens=30).tokens
    with pytest.raises(UserError, match="its (own )?tokenizer"):
        decode.load(target, tmp_path / "d")
