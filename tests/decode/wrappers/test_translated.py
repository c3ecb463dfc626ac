"""A drafter with another vocabulary in the engine: the output is plain decoding's, right drafts are accepted, and the inner
side sees the committed text in its own tokens, round after round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from align.target.loading import load_target
from align.target.model import Target, TargetOutput
from decode import Decoder, Sampling
from decode.drafters.base import Request
from decode.wrappers.byte_tokenizer import ByteTokenizer
from decode.wrappers.translated import TranslatedDrafter, TranslatedSession
from decode.wrappers.vocabularies import VocabularyMap
from tests.fakes import TableTarget
from tests.tokenizers import KINDS, TEXT, byte_level, debug, sentencepiece

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


class Reciting(TableTarget):
    """Says one text, in its tokenizer's tokens; after anything else, token 0."""

    def __init__(self, tokens: list[int], vocab_size: int, eos: int) -> None:
        super().__init__()
        self.script, self.vocab_size, self.eos_ids = [*tokens, *[0] * 50], vocab_size, (eos,)

    def forward(self, tokens_BL: Tensor, *, cache: Any, logits: bool = True, **_: Any) -> TargetOutput:
        past, fresh = cache.length, tokens_BL[0].tolist()
        cache.write(fresh)
        ends = range(past + 1, past + len(fresh) + 1)
        said = [self.script[n] if cache.slots[:n] == self.script[:n] else 0 for n in ends]
        hidden_BLD = torch.tensor(said)[None, :, None].float()
        return TargetOutput(self.head(hidden_BLD) if logits else None, hidden_BLD, None)

    def head(self, hidden: Tensor) -> Tensor:
        return F.one_hot(hidden[..., 0].long(), self.vocab_size).float()


@pytest.mark.parametrize(("own", "other"), [("byte-level", "sentencepiece"), ("sentencepiece", "byte-level")])
def test_right_drafts_of_text_are_accepted_but_for_the_seam(own: str, other: str) -> None:
    """Merged tokens on both sides, and an end: no token is refused but some of a draft's last word."""
    vocabulary = VocabularyMap(KINDS[other](), KINDS[own]())
    side = vocabulary.target
    text = [*side.encode(" ".join(TEXT).encode()), side.eos]
    prompt = text[:5]
    target: Any = Reciting(text, len(side.pieces), side.eos)
    drafter = Watched(Inner(knowing(vocabulary, text)), vocabulary, draft_tokens=20)
    out = Decoder(target, drafter).generate(prompt, max_new_tokens=900)
    assert prompt + out.tokens == text and out.finish == "eos"
    refused = [d - a for d, a in zip(out.drafted, out.accepted, strict=True)]
    assert drafter.checked == out.calls
    assert sum(refused) <= 0.08 * sum(out.drafted) and max(refused) <= 3
    assert refused[-1] == 0 and out.tokens[-1] == side.eos
    # six tokens of the one hold about as much as so many of the other
    share = len(text) / len(vocabulary.to_drafter(text, [])[1])
    assert out.tau > 0.8 * K * share


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "bytes"])
def test_the_output_does_not_depend_on_the_drafts(target: Target, kind: str, prompt: list[int]) -> None:
    """Any ids: special ones, and some that no token has."""
    vocabulary = VocabularyMap(KINDS[kind](), target.tokenizer)
    size = len(vocabulary.drafter.pieces)
    generator = torch.Generator().manual_seed(0)

    def guess(context: list[int], k: int) -> list[int]:
        length = int(torch.randint(0, k + 1, (), generator=generator))
        return (torch.randint(-1, size + 2, (length,), generator=generator)).tolist()

    plain = Decoder(target).generate(prompt, max_new_tokens=40, sampling=VARIED)
    drafter = Watched(Inner(guess), vocabulary)
    out = Decoder(target, drafter).generate(prompt, max_new_tokens=40, sampling=VARIED)
    assert out.tokens == plain.tokens and sum(out.drafted) > 0
    sampled = Decoder(target, drafter).generate(prompt, max_new_tokens=40, sampling=Sampling(1.0, seed=3))
    assert len(sampled.tokens) == 40 and drafter.checked > 0


def session(vocabulary: VocabularyMap, script: Script, tokens: list[int], **options: Any) -> Any:
    request: Any = SimpleNamespace(
        tokens=tokens,
        sampling=Sampling(),
        target=SimpleNamespace(
            device=torch.device("cpu"), vocab_size=options.pop("vocab_size", len(vocabulary.target.pieces))
        ),
    )
    return TranslatedDrafter(Inner(script), vocabulary, **options).start(request)


def test_proposals_are_points_and_no_longer_than_asked() -> None:
    vocabulary = VocabularyMap(sentencepiece(), debug())
    side = vocabulary.drafter
    drafts = session(vocabulary, lambda context, k: side.encode(b"the drafter."), [60], draft_tokens=9)
    assert drafts.drafter.draft_tokens == drafts.drafter.draft_nodes == 9
    assert drafts.drafter.name == "inner+translation" and drafts.drafter.law(Sampling(1.0)) == "point"
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
