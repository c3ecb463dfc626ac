"""Standalone diffusion drafters in the engine: every order and number of steps keeps the target's law."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import decode
from align.common.errors import UserError
from align.models.checkpoints.standalone import save_standalone
from align.target.loading import load_target
from align.target.model import Target
from decode import Decoder, Sampling
from decode.drafters.diffusion import ORDERS, DiffusionProposer, DiffusionWriter
from decode.wrappers.copying import CopyingDrafter
from tests.builders import DIFFUSION_KINDS as KINDS
from tests.builders import PROMPT, VARIED
from tests.builders import diffusion_drafter as drafter
from tests.builders import session_after_prefill as sessions
from tests.exact_distribution import exact_law
from tests.fakes import frequencies, plausible


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("steps", "order"),
    [
        (1, "left_to_right"),
        pytest.param(3, "left_to_right", marks=pytest.mark.slow),
        (2, "random"),
        pytest.param(9, "confidence", marks=pytest.mark.slow),
    ],
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
    ("ddit", 4, "blockwise", "hybrid"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps", "order", "verifier"), CASES)
def test_sampled_output_has_the_targets_joint_law(
    shallow: Target, kind: str, steps: int, order: str, verifier: str
) -> None:
    runs, sampling = 300, Sampling(1.0, top_k=2)
    decoder = Decoder(shallow, DiffusionProposer(drafter(shallow, kind), 4, steps, order), verifier)
    found = frequencies(decoder, sampling, runs, PROMPT, 4)
    assert plausible(found, exact_law(shallow, PROMPT, 4, sampling), runs)


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
            torch.testing.assert_close(proposal.q.dense(target.vocab_size)[k], q[k], atol=1e-5, rtol=1e-4)


def test_blocks_of_two_steps_go_from_left_to_right(target: Target) -> None:
    """Within a block the surest first, so not always in order."""
    made, inside = drafter(target, "ddit"), set()
    for k, steps, blocks in ((8, 4, [4, 4]), (7, 4, [4, 3]), (7, 3, [5, 2]), (5, 5, [2, 2, 1]), (6, 2, [6])):
        _, session = sessions(target, DiffusionProposer(made, k, steps, "blockwise"), Sampling(0.9, seed=4))
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_hot_start_keeps_the_output(target: Target, kind: str, order: str) -> None:
    proposer = DiffusionProposer(drafter(target, kind), 5, 3, order, hot_start=True)
    for sampling in (Sampling(), VARIED):
        expected = Decoder(target).generate(PROMPT, max_new_tokens=30, sampling=sampling)
        assert (
            Decoder(target, proposer).generate(PROMPT, max_new_tokens=30, sampling=sampling).tokens
            == expected.tokens
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "verifier"),
    [
        ("left_to_right", "token"),
        ("left_to_right", "block"),
        ("random", "hybrid"),
        ("confidence", "hybrid"),
        ("blockwise", "hybrid"),
    ],
)
def test_a_hot_start_keeps_the_targets_joint_law(shallow: Target, order: str, verifier: str) -> None:
    runs, sampling = 300, Sampling(1.0, top_k=2)
    proposer = DiffusionProposer(drafter(shallow, "ddit"), 3, 2, order, hot_start=True)
    decoder = Decoder(shallow, proposer, verifier)
    found = frequencies(decoder, sampling, runs, PROMPT, 5)
    assert plausible(found, exact_law(shallow, PROMPT, 5, sampling), runs)


def test_a_hot_start_draws_from_the_last_drafts_distributions_in_their_new_places(target: Target) -> None:
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
    torch.testing.assert_close(new[2:4], (denoise(block) / 0.9).softmax(-1)[2:4], atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        engine.request.tokens.extend([1] * 7)  # everything was kept: nothing is left to begin with
        engine.request.history.extend([1] * 7)
        session.propose(6)
    assert passes[5:] == [6, 4, 2]


@pytest.mark.parametrize("kind", ["ddit", "masked_lm"])
def test_trees_over_one_steps_marginals(target: Target, kind: str) -> None:
    made = drafter(target, kind)
    _, session = sessions(target, DiffusionProposer(made, 4, tree_nodes=7), Sampling())
    tree = session.propose(4)
    assert tree.law == "point" and len(tree) == 7 and tree.parents is not None
    expected = Decoder(target).generate(PROMPT, max_new_tokens=30)
    out = Decoder(target, DiffusionProposer(made, 4, tree_nodes=7)).generate(PROMPT, max_new_tokens=30)
    assert out.tokens == expected.tokens and max(out.nodes) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("siblings", "verifier"),
    [
        (None, "point_mass"),
        (None, "self_selection"),
        ("iid", "recursive"),
        ("without_replacement", "traversal"),
    ],
)
def test_trees_keep_the_targets_joint_law(shallow: Target, siblings, verifier: str) -> None:  # type: ignore[no-untyped-def]
    runs, sampling = 300, Sampling(1.0, top_k=2)
    proposer = DiffusionProposer(drafter(shallow, "ddit"), 3, tree_nodes=5, siblings=siblings)
    decoder = Decoder(shallow, proposer, verifier)
    found = frequencies(decoder, sampling, runs, PROMPT, 4)
    assert plausible(found, exact_law(shallow, PROMPT, 4, sampling), runs)


@pytest.mark.parametrize("kind", ["ddit", "ddit, full", "masked_lm"])
def test_a_long_text_in_the_drafters_own_tokens(target: Target, kind: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Beyond `LONGEST_CONTEXT` the later half is what it is shown; going back there works too."""
    from decode.drafters import diffusion

    monkeypatch.setattr(diffusion, "LONGEST_CONTEXT", 24)
    made = drafter(target, kind)
    text = torch.randint(4, 200, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    session = diffusion.DiffusionWriter(made, 3).start(text[:20])
    for end in range(21, 60):
        session.extend(end - 1, text[end - 1 : end])
        assert session.context.tokens == text[session.first : end] and len(session.context.tokens) <= 24
    found = session.propose(3, Sampling())
    session.extend(5, text[5:60])
    assert session.context.tokens == text[session.first : 60]
    fresh = diffusion.DiffusionWriter(made, 3).start(text)
    assert session.propose(3, Sampling()) == fresh.propose(3, Sampling()) and len(found) == 3


def test_a_long_text_keeps_half_of_the_longest_context(target: Target, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from decode.drafters import diffusion

    monkeypatch.setattr(diffusion, "LONGEST_CONTEXT", 24)
    session = diffusion.DiffusionWriter(drafter(target, "ddit"), 3).start(list(range(4, 34)))
    assert session.context.tokens == list(range(22, 34))


def test_a_writers_drafts_are_those_of_one_pass(target: Target) -> None:
    made = drafter(target, "ddit")
    _, session = sessions(target, DiffusionProposer(made, 3), Sampling())
    written = DiffusionWriter(made, 3).start(session.request.tokens).propose(3, Sampling())
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


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "confidence"])
def test_copies_under_an_unmasked_law(shallow: Target, order: str) -> None:
    text = [20, 21, 22, 23, 24] * 4
    drafts = CopyingDrafter(DiffusionProposer(drafter(shallow, "ddit"), 4, 2, order))
    for verifier in ("hybrid", "point_mass"):
        runs, sampling = 200, Sampling(1.0, top_k=2)
        decoder = Decoder(shallow, drafts, verifier)
        found = frequencies(decoder, sampling, runs, text, 4)
        assert plausible(found, exact_law(shallow, text, 4, sampling), runs)


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
            assert out.tokens == Decoder(target).generate("Say a word or two.", max_new_tokens=30).tokens
    with pytest.raises(UserError, match="its (own )?tokenizer"):
        decode.load(target, tmp_path / "d")
