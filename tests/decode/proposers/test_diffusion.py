"""Standalone diffusion drafters in the engine: every order and number of steps keeps the target's law."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import decode
from decode import Decoder, Sampling
from decode.proposers import diffusion
from decode.proposers.diffusion import ORDERS, DiffusionProposer, DiffusionWriter
from specalign.common.errors import UserError
from specalign.formats.standalone import save_standalone
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import PROMPT
from tests.builders import diffusion_drafter as drafter
from tests.builders import session_after_prefill as sessions


@pytest.mark.parametrize("order", ORDERS)
def test_q_is_what_each_token_was_drawn_from(target: Target, order: str) -> None:
    """Steps and rows of q against a replay: each step's block is rebuilt from the tokens that earlier steps drew."""
    made = drafter(target, "ddit")
    proposer, sampling = DiffusionProposer(made, 5, 3, order), Sampling(0.9, seed=4)
    from decode.engine.engine import Engine

    engine = Engine(target, PROMPT, 20, sampling, proposer, "point_mass")
    with torch.no_grad():
        engine.begin()
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
            torch.testing.assert_close(
                proposal.q.dense(target.vocab_size)[k], q[k], atol=1e-5, rtol=1e-4
            )


def test_blocks_of_two_steps_go_from_left_to_right(target: Target) -> None:
    """Within a block the surest first, so not always in order."""
    made, inside = drafter(target, "ddit"), set()
    for k, steps, blocks in (
        (8, 4, [4, 4]),
        (7, 4, [4, 3]),
        (7, 3, [5, 2]),
        (5, 5, [2, 2, 1]),
        (6, 2, [6]),
    ):
        _, session = sessions(
            target, DiffusionProposer(made, k, steps, "blockwise"), Sampling(0.9, seed=4)
        )
        with torch.no_grad():
            drafted = session.propose(k).steps_K.tolist()  # type: ignore[union-attr]
        at = 0
        for b, size in enumerate(blocks):
            own = drafted[at : at + size]
            assert set(own) <= {2 * b, 2 * b + 1} and len(set(own)) == min(2, steps - 2 * b)
            inside.add(own == sorted(own))
            at += size
        assert at == k
    assert inside == {True, False}


def test_a_hot_start_draws_from_the_last_drafts_distributions_in_their_new_places(
    target: Target,
) -> None:
    made, sampling = drafter(target, "ddit"), Sampling(0.9, seed=4)
    engine, session = sessions(target, DiffusionProposer(made, 6, 3, hot_start=True), sampling)
    passes: list[int] = []
    denoise = session.context.denoise

    def counted(block_K):  # type: ignore[no-untyped-def]
        passes.append(int((block_K == made.mask_id).sum()))
        return denoise(block_K)

    session.context.denoise = counted
    with torch.no_grad():
        first = session.propose(6)
        assert passes == [6, 4, 2]
        engine.request.tokens.extend([5, 9])  # one draft kept, then the target's own token
        engine.request.history.extend([5, 9])
        second = session.propose(6)
    assert passes[3:] == [4, 2]  # two positions were drawn before the network ran
    old, new = (x.q.dense(target.vocab_size) for x in (first, second))
    torch.testing.assert_close(new[:2], old[2:4])
    block = torch.tensor([*second.tokens_K[:2].tolist(), *[made.mask_id] * 4])
    torch.testing.assert_close(
        new[2:4], (denoise(block) / 0.9).softmax(-1)[2:4], atol=1e-5, rtol=1e-4
    )
    with torch.no_grad():
        engine.request.tokens.extend([1] * 7)  # everything was kept: nothing is left to begin with
        engine.request.history.extend([1] * 7)
        session.propose(6)
    assert passes[5:] == [6, 4, 2]


@pytest.mark.parametrize("kind", ["ddit", "ddit, full", "masked_lm"])
def test_a_long_text_in_the_drafters_own_tokens(
    target: Target, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond `LONGEST_CONTEXT` it sees the later half of that; going back works too."""
    monkeypatch.setattr(diffusion, "LONGEST_CONTEXT", 24)
    writer = DiffusionWriter(drafter(target, kind), 3)
    text = torch.randint(4, 200, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    session = writer.start()
    for end in (20, 24, 25, 26, 36, 37, 60, 55, 30):
        drafts = session.propose(text[:end], 3)
        assert (
            session.context.tokens == text[session.first : end]
            and len(session.context.tokens) <= 24
        )
        fresh = writer.start()
        fresh.first = session.first
        assert drafts == fresh.propose(text[:end], 3) and len(drafts) == 3
    assert session.propose([], 3) == []
    fresh = writer.start()
    fresh.propose(text[:25], 3)
    assert fresh.first == 13


def test_a_writers_drafts_are_those_of_one_pass(target: Target) -> None:
    made = drafter(target, "ddit")
    _, session = sessions(target, DiffusionProposer(made, 3), Sampling())
    written = DiffusionWriter(made, 3).start().propose(session.request.tokens, 3)
    assert written == session.propose(3).tokens_K.tolist()


def test_what_may_not_come_yet_is_barred_as_far_as_the_last_position(target: Target) -> None:
    """A minimum length ends within the draft: end of sequence is barred before, and free after it."""
    _, session = sessions(
        target, DiffusionProposer(drafter(target, "ddit"), 4), Sampling(1.0, min_new_tokens=4)
    )
    count = session.request.history.count
    for places in ([0, 1, 2, 3], [2, 3], [3], [1]):
        barred = session.before(torch.tensor(places)).barred
        for row, place in enumerate(places):
            its = barred if barred is None or barred.dim() == 1 else barred[row]
            ends = [its is not None and bool(its[i]) for i in target.eos_ids]
            assert ends == [count + place < 4] * len(ends)


def test_options_that_exclude_each_other(target: Target) -> None:
    made = drafter(target, "ddit")
    with pytest.raises(UserError, match="hot_start takes the place of one of several steps"):
        DiffusionProposer(made, hot_start=True)
    with pytest.raises(UserError, match="tree_nodes=4: trees are made of one step"):
        DiffusionProposer(made, steps=2, tree_nodes=4)
    with pytest.raises(UserError, match="order='randm' is unknown"):
        DiffusionProposer(made, order="randm")


def test_the_context_follows_the_text(target: Target) -> None:
    """Longer, shorter or changed at its end; nothing is run twice."""
    _, session = sessions(target, DiffusionProposer(drafter(target, "ddit"), 4), Sampling())
    text = session.request.tokens
    for change in ([], [5, 9], [8]):
        text[len(text) - len(change) // 2 :] = change
        session.propose(4)
        assert session.context.tokens == text and session.context.cache.length == len(text)


def test_a_vocabulary_of_its_own(target: Target, tmp_path: Path) -> None:
    """A drafter of another tokenizer, by its folder and the tokenizer's: the output stays the target's."""
    from tests.tokenizers import byte_level

    tokenizer = byte_level()
    tokenizer.save_pretrained(str(tmp_path / "t"))
    other = load_target("debug", dtype="float32", device="cpu")
    other.vocab_size = len(tokenizer)
    save_standalone(drafter(other, "ddit"), tmp_path / "d")
    decoder = decode.load(target, tmp_path / "d", drafter_tokenizer=tmp_path / "t", copying=False)
    assert decoder.name == "diffusion+translation"
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        out = decoder.generate("Say a word or two.", max_new_tokens=30, sampling=sampling)
        assert sum(out.drafted) > 0
        if sampling.greedy:
            assert (
                out.tokens
                == Decoder(target).generate("Say a word or two.", max_new_tokens=30).tokens
            )
    with pytest.raises(UserError, match="its (own )?tokenizer"):
        decode.load(target, tmp_path / "d")
