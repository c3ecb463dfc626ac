"""A drafter with another vocabulary in the engine: the output is plain decoding's, right drafts are accepted, and the inner
side sees the committed text in its own tokens, round after round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode import Decoder, Sampling
from decode.proposers.base import Request
from decode.proposers.byte_tokenizer import ByteTokenizer
from decode.proposers.translated import TranslatedDrafter, TranslatedSession
from decode.proposers.vocabularies import VocabularyMap
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.tokenizers import KINDS, byte_level, debug, sentencepiece

K = 6
VARIED = Sampling(repetition_penalty=1.4)  # the random target repeats itself otherwise
Script = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def tiny() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


@pytest.fixture
def target(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """No end of sequence."""
    monkeypatch.setattr(tiny, "eos_ids", ())
    yield tiny


class Inner:
    """A drafter made of one function, (its context, k) → its tokens, that checks what it is told."""

    name = "inner"

    def __init__(self, script: Script, draft_tokens: int = K) -> None:
        self.script, self.draft_tokens = script, draft_tokens
        self.watch: Callable[[list[int]], None] = lambda context: None
        self.asked: list[int] = []

    def start(self) -> Any:
        def propose(context: list[int], k: int) -> list[int]:
            assert k >= 1
            self.watch(context)
            self.asked.append(k)
            return self.script(context, k)

        return SimpleNamespace(propose=propose)


class Watched(TranslatedDrafter):
    """Compares, whenever its inner side drafts, that side's context with the whole committed text in its tokens."""

    def start(self, request: Request) -> TranslatedSession:
        def watch(context: list[int]) -> None:
            assert (0, context) == self.vocabulary.to_drafter(request.tokens, [])
            self.checked += 1

        self.checked = 0
        self.inner.watch = watch  # type: ignore[attr-defined]
        return super().start(request)


def units(side: ByteTokenizer, tokens: list[int]) -> list[int]:
    """Tokens as bytes, and special tokens as numbers beyond them."""
    return [unit for token in tokens for unit in side.piece(token) or [256 + token]]


def knowing(vocabulary: VocabularyMap, text: list[int]) -> Script:
    """Drafts what is right: the target tokens `text`, all of them, in the drafter's tokens."""
    side = vocabulary.drafter
    known = units(side, vocabulary.to_drafter(text, [])[1])

    def script(context: list[int], k: int) -> list[int]:
        done = units(side, context)
        assert known[: len(done)] == done
        drafts: list[int] = []
        data = b""
        for unit in [*known[len(done) : len(done) + 40 * k], 256]:
            if unit < 256:
                data += bytes([unit])
            else:
                drafts += [*side.encode(data), unit - 256]
                data = b""
        return drafts[:-1][:k]

    return script


PROMPTS = [
    [4, 90, 17, 203, 90, 17],
    [5],
    [1, 90, 17, 2, 3, 1, 40, 0, 90],  # with special tokens
]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece, legacy", "unigram", "bytes"])
def test_right_drafts_are_all_accepted(target: Target, kind: str, prompt: list[int]) -> None:
    """The random target says bytes that are no text, halves of characters and special tokens. Its tokens never merge, so
    nothing that was drafted right may be refused."""
    vocabulary = VocabularyMap(KINDS[kind](), target.tokenizer)
    plain = Decoder(target).generate(prompt, max_new_tokens=48, sampling=VARIED)
    drafter = Watched(Inner(knowing(vocabulary, prompt + plain.tokens)), vocabulary)
    out = Decoder(target, drafter).generate(prompt, max_new_tokens=48, sampling=VARIED)
    assert out.tokens == plain.tokens
    assert drafter.checked >= out.calls - 1
    at = 1  # where in the output a call's tokens begin
    for drafted, accepted in zip(out.drafted, out.accepted, strict=True):
        if accepted < drafted:  # a special token that the drafter lacks: to it, text
            assert out.tokens[at + accepted] in vocabulary.target.names
            assert out.tokens[at + accepted] not in vocabulary._back
        at += accepted + 1
    held = sum(K - drafted for drafted in out.drafted[:-1])
    assert out.tau > 4 and held <= 3 * out.calls  # half a character at most


def session(vocabulary: VocabularyMap, script: Script, tokens: list[int], **options: Any) -> Any:
    request: Any = SimpleNamespace(
        tokens=tokens,
        sampling=Sampling(),
        target=SimpleNamespace(
            device=torch.device("cpu"),
            vocab_size=options.pop("vocab_size", len(vocabulary.target.pieces)),
        ),
    )
    return TranslatedDrafter(Inner(script), vocabulary, **options).start(request)


def test_proposals_are_points_and_no_longer_than_asked() -> None:
    vocabulary = VocabularyMap(sentencepiece(), debug())
    side = vocabulary.drafter
    drafts = session(
        vocabulary, lambda context, k: side.encode(b"the drafter."), [60], draft_tokens=9
    )
    assert drafts.drafter.draft_tokens == drafts.drafter.draft_nodes == 9
    assert (
        drafts.drafter.name == "inner+translation" and drafts.drafter.law(Sampling(1.0)) == "point"
    )
    proposal = drafts.propose(4)
    assert proposal.law == "point" and proposal.q is None and proposal.tokens_K.dtype == torch.int64
    assert vocabulary.target.spell(proposal.tokens_K.tolist()) == b"the "
    assert drafts.drafter.inner.asked == [K]  # how many of its tokens four are is not known


def test_nothing_that_maps_is_no_proposal() -> None:
    vocabulary = VocabularyMap(sentencepiece(), debug())
    side = vocabulary.drafter
    for none in ([], [-1], [10**6, 300], side.encode("😀".encode()[:2])):
        assert session(vocabulary, lambda context, k, none=none: none, [60]).propose(4) is None
    rows = vocabulary.target.of[b"d"] + 1  # of a model that has fewer than its tokenizer has tokens
    cut = session(vocabulary, lambda context, k: side.encode(b"adda."), [60], vocab_size=rows)
    assert vocabulary.target.spell(cut.propose(6).tokens_K.tolist()) == b"adda."
    cut = session(vocabulary, lambda context, k: side.encode(b"adze."), [60], vocab_size=rows)
    assert vocabulary.target.spell(cut.propose(6).tokens_K.tolist()) == b"ad"


def test_a_drafter_of_the_same_vocabulary_is_passed_through() -> None:
    vocabulary = VocabularyMap(byte_level(), byte_level())
    tokens = [7, 300, 7, 41]
    drafts = session(vocabulary, lambda context, k: [*context[-2:], 12, 500], tokens)
    assert drafts.propose(4).tokens_K.tolist() == [7, 41, 12, 500]
    assert drafts.drafter.inner.asked == [4] and drafts.context == tokens
    tokens += [1, 2]
    assert drafts.propose(3).tokens_K.tolist() == [1, 2, 12]
    assert drafts.context == tokens
