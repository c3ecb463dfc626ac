"""A causal language model as the drafter: same output, honest q, a context that goes back exactly."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from align.common.errors import UserError
from align.target.model import Target
from decode import Decoder, Sampling
from decode.drafters.autoregressive import (
    AutoregressiveDrafter,
    AutoregressiveWriter,
    CausalContext,
)
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import probs
from decode.speculation.tree import depths
from decode.wrappers.copying import CopyingDrafter
from decode.wrappers.translated import TranslatedDrafter
from decode.wrappers.vocabularies import VocabularyMap
from tests.builders import ALL_VARIED as VARIED
from tests.builders import PROMPTS, watched
from tests.builders import smaller_model as smaller
from tests.exact_distribution import exact_law
from tests.fakes import LENGTH, LETTERS, SETTINGS, TableTarget, frequencies, plausible


@pytest.fixture(scope="module")
def model(target: Target) -> Target:
    return smaller(target)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_output_is_plain_decodings(target: Target, model: Target, prompt: list[int]) -> None:
    accepted, drafter = 0, AutoregressiveDrafter(model)
    for count, sampling in ((1, Sampling()), (2, VARIED), (3, Sampling()), (24, Sampling()), (24, VARIED)):
        expected = Decoder(target).generate(prompt, max_new_tokens=count, sampling=sampling)
        out = Decoder(target, drafter).generate(prompt, max_new_tokens=count, sampling=sampling)
        assert (out.tokens, out.finish) == (expected.tokens, expected.finish)
        assert max(out.drafted, default=0) <= 4
        accepted += sum(out.accepted)
    assert accepted > 3


def test_an_end_of_sequence_ends_it(target: Target, model: Target) -> None:
    """The target's random text ends somewhere; every token of it stands for the end once."""
    text = Decoder(target).generate(PROMPTS[0], max_new_tokens=12).tokens
    other = copy.copy(target)
    for token in set(text):
        other.eos_ids = (token,)
        expected = Decoder(other).generate(PROMPTS[0], max_new_tokens=20)
        out = Decoder(other, AutoregressiveDrafter(model)).generate(PROMPTS[0], max_new_tokens=20)
        assert out.tokens == expected.tokens and out.finish == "eos"


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.8, top_k=20, repetition_penalty=1.3, min_new_tokens=9, banned=(9,))],
)
def test_q_is_what_each_token_was_drawn_from(target: Target, model: Target, sampling: Sampling) -> None:
    """After rejections too: every row of q equals that of one fresh forward over the text and the drafts before it."""
    seen: list[tuple[list[int], Proposal]] = []
    rejected = accepted = 0
    for seed in range(3):
        drafter = watched(AutoregressiveDrafter(model), seen)
        out = Decoder(target, drafter).generate(
            PROMPTS[0], max_new_tokens=24, sampling=replace(sampling, seed=seed)
        )
        rejected += sum(out.drafted) - sum(out.accepted)
        accepted += sum(out.accepted)
    assert rejected > 10 and accepted > 10
    for text, proposal in seen:
        assert proposal.law == "causal" and proposal.q is not None
        row = [*text, *proposal.tokens_K.tolist()]
        logits = model.forward(torch.tensor([row])).logits_BLV
        assert logits is not None
        for k, found in enumerate(proposal.q.dense(260)):
            before, done = row[: len(text) + k], len(text) + k - len(PROMPTS[0])
            barred = {9, *target.eos_ids} if done < sampling.min_new_tokens else {*sampling.banned}
            values = logits[0, len(text) + k - 1].clone()
            for token in set(before) if sampling.repetition_penalty != 1 else ():
                values[token] *= sampling.repetition_penalty ** (-1 if values[token] > 0 else 1)
            values[list(barred if sampling.banned else ())] = -torch.inf
            plain = Sampling(sampling.temperature, top_k=sampling.top_k)
            torch.testing.assert_close(found, probs(values, plain), atol=1e-5, rtol=1e-3)
            assert float(found[row[len(text) + k]]) > 0


@pytest.mark.slow
def test_sampled_output_has_the_targets_joint_law(target: Target, model: Target) -> None:
    runs, sampling = 100, Sampling(1.0, top_k=2)
    decoder = Decoder(target, AutoregressiveDrafter(model, 2), "token")
    found = frequencies(decoder, sampling, runs, PROMPTS[0], 3)
    assert plausible(found, exact_law(target, PROMPTS[0], 3, sampling), runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "verifier"),
    [("plain", "block"), ("sharp top-k", "token"), ("penalty", "traversal"), ("everything", "point_mass")],
)
def test_joint_frequencies_on_tables(setting: str, verifier: str) -> None:
    target = TableTarget(4 if setting == "everything" else 3)
    target.eos_ids = (3,) if setting == "everything" else ()
    drafter = AutoregressiveDrafter(TableTarget(target.vocab_size, seed=9), 3)  # type: ignore[arg-type]
    law = target.law(LETTERS, LENGTH, SETTINGS[setting])
    found = frequencies(Decoder(target, drafter, verifier), SETTINGS[setting], 250)  # type: ignore[arg-type]
    assert plausible(found, law, 250)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_drafter_that_is_the_target_is_always_right(setting: str) -> None:
    """q = p, penalties included; under Gumbel coupling the very tokens."""
    target = TableTarget(6, seed=4)
    for verifier in ("token", "block", "gumbel"):
        for seed in range(5):
            decoder = Decoder(target, AutoregressiveDrafter(target, 4), verifier)  # type: ignore[arg-type]
            sampling = replace(SETTINGS[setting], seed=seed)
            out = decoder.generate(LETTERS, max_new_tokens=21, sampling=sampling)
            assert out.accepted == out.drafted
            if verifier == "gumbel":
                plain = Decoder(target, None, "gumbel")  # type: ignore[arg-type]
                assert out.tokens == plain.generate(LETTERS, max_new_tokens=21, sampling=sampling).tokens


def test_a_context_goes_back_exactly(target: Target) -> None:
    context = CausalContext(target, 40)

    def fresh(text: list[int]) -> torch.Tensor:
        logits = target.forward(torch.tensor([text])).logits_BLV
        assert logits is not None
        return logits[0]

    text = [5, 6, 7, 8]
    for change in ([], [9, 10], [30], [31, 32, 33]):
        for cut in (0, 1, 3):
            text = [*text[: len(text) - cut], *change, 40]
            unread = context.follow(text)
            assert len(unread) >= 1 and [*context.tokens, *unread] == text
            torch.testing.assert_close(context.read(unread)[0], fresh(text)[-1], atol=1e-4, rtol=1e-3)
    again = context.follow(text)  # nothing new: the last token is read once more
    assert again == text[-1:]
    parents, drafts = (-1, 0, -1, 2, 1), [50, 51, 52, 53, 54]
    logits = context.read(again, drafts, parents)
    assert len(logits) == 6
    for node in range(6):
        path = [i for i in range(5) if i + 1 == node or node in _below(parents, i)]
        torch.testing.assert_close(
            logits[node], fresh([*text, *(drafts[i] for i in path)])[-1], atol=1e-4, rtol=1e-3
        )
    context.keep(5, [2, 3])
    text += [52, 53]
    assert context.tokens == text and context.cache.length == len(text)
    torch.testing.assert_close(context.read([60])[0], fresh([*text, 60])[-1], atol=1e-4, rtol=1e-3)


def _below(parents: tuple[int, ...], above: int) -> list[int]:
    """Nodes (from 1) below a drafted token."""
    found: list[int] = []
    for i, parent in enumerate(parents):
        if parent == above or parent + 1 in found:
            found.append(i + 1)
    assert len(found) <= max(depths(parents))
    return found


def test_long_prompts_are_read_in_parts(
    target: Target, model: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.drafters.autoregressive._READ_AT_ONCE", 5)
    prompt = [(7 * i) % 200 + 4 for i in range(33)]
    context = CausalContext(model, 60)
    logits = model.forward(torch.tensor([[*prompt, 8, 9]])).logits_BLV
    assert logits is not None
    torch.testing.assert_close(context.read(prompt, [8, 9]), logits[0, -3:], atol=1e-4, rtol=1e-3)
    expected = Decoder(target).generate(prompt, max_new_tokens=9)
    assert (
        Decoder(target, AutoregressiveDrafter(model)).generate(prompt, max_new_tokens=9).tokens
        == expected.tokens
    )


def test_a_drafter_with_the_shorter_context_falls_silent() -> None:
    target, model = TableTarget(4), TableTarget(4, context_limit=12)
    out = Decoder(target, AutoregressiveDrafter(model, 4)).generate(LETTERS, max_new_tokens=20)  # type: ignore[arg-type]
    assert out.tokens == Decoder(target).generate(LETTERS, max_new_tokens=20).tokens  # type: ignore[arg-type]
    room = [12 + 1 - (len(LETTERS) + 1)]  # the first round's: 12 tokens are read and one more is drafted
    assert out.drafted[0] == min(4, *room) and out.drafted[-1] == 0


def test_copies_in_front(target: Target, model: Target) -> None:
    text = [20, 21, 22, 23, 24] * 4
    drafter = CopyingDrafter(AutoregressiveDrafter(model))
    expected = Decoder(target).generate(text, max_new_tokens=30)
    assert Decoder(target, drafter).generate(text, max_new_tokens=30).tokens == expected.tokens
    decoder = Decoder(target, drafter)
    assert len(decoder.generate(text, max_new_tokens=30, sampling=Sampling(1.0)).tokens) > 0


def test_another_vocabulary(target: Target) -> None:
    """Refused where tokens are taken as they are; behind a translation it drafts."""
    other = smaller(target, vocab_size=300)
    with pytest.raises(
        UserError, match="'smaller' has a vocabulary of 300, target 'debug' has 260: it needs"
    ):
        Decoder(target, AutoregressiveDrafter(other)).generate(PROMPTS[0], max_new_tokens=9)
    with pytest.raises(UserError, match="draft_tokens=0: must be at least 1"):
        AutoregressiveDrafter(other, 0)
    from tests.tokenizers import byte_level

    tokenizer = byte_level()
    own = smaller(target, vocab_size=len(tokenizer))
    inner = AutoregressiveWriter(own, 5)
    drafter = TranslatedDrafter(inner, VocabularyMap(tokenizer, target.tokenizer))
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        out = Decoder(target, drafter).generate("Say a word.", max_new_tokens=30, sampling=sampling)
        assert sum(out.drafted) > 0
        if sampling.greedy:
            assert out.tokens == Decoder(target).generate("Say a word.", max_new_tokens=30).tokens


def test_a_writers_drafts_are_the_models_own(target: Target) -> None:
    target = copy.copy(target)
    target.eos_ids = ()
    session = AutoregressiveWriter(target, 4).start([4, 90, 17])
    expected = Decoder(target).generate([4, 90, 17], max_new_tokens=9).tokens
    assert session.propose(4, Sampling()) == expected[:4]
    session.extend(3, expected[:2])
    assert session.propose(4, Sampling()) == expected[2:6]
    session.extend(4, [expected[1], 99])
    other = Decoder(target).generate([4, 90, 17, *expected[:2], 99], max_new_tokens=3).tokens
    assert session.propose(3, Sampling()) == other


def test_a_writer_stops_at_its_models_context(target: Target) -> None:
    """The last draft is not read: a text of all but two places leaves room for three."""
    target = copy.copy(target)
    target.eos_ids, target.context_limit = (), 9
    session = AutoregressiveWriter(target, 6).start(list(range(4, 11)))
    assert len(session.propose(6, Sampling())) == 3
    session.extend(7, [5, 6])
    assert len(session.propose(6, Sampling())) == 1
    session.extend(9, [7])
    assert session.propose(6, Sampling()) == []
    assert AutoregressiveWriter(target, 6).start([]).propose(6, Sampling()) == []  # nothing to read
