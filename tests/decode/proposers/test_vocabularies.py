"""Drafter tokens ↔ target tokens: no byte is lost, nothing committed is touched, nothing is special by accident."""

from __future__ import annotations

import json
import re
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.proposers.vocabularies import VocabularyMap
from specalign.common.errors import UserError
from tests.byte_streams import quick, stream
from tests.tokenizers import (
    EACH_KIND,
    KINDS,
    REAL,
    TEXT,
    byte_level,
    code_with,
    debug,
    digits,
    sentencepiece,
    wrap,
)

PAIRS = [
    ("sentencepiece", "byte-level"),
    ("byte-level", "sentencepiece"),
    ("sentencepiece, legacy", "bytes"),
    ("byte-level, space in front", "byte-level"),
    ("unigram", "sentencepiece, legacy"),
    ("bytes", "byte-level"),
    pytest.param("byte-level", REAL, marks=pytest.mark.slow),
]


@cache
def pair(drafter: str, target: str) -> VocabularyMap:
    return VocabularyMap(KINDS[drafter](), KINDS[target]())


def whole(found: tuple[int, list[int]]) -> list[int]:
    kept, tail = found
    assert kept == 0
    return tail


@pytest.mark.parametrize(("drafter", "target"), PAIRS)
@quick
@given(data=st.data())
def test_the_context_grows_into_the_whole_text(
    drafter: str, target: str, data: st.DataObject
) -> None:
    """Round after round the drafter's context is what tokenising everything at once would give, whatever ids the target
    says, fragments of characters and special tokens among them."""
    vocabulary = pair(drafter, target)
    side = vocabulary.target
    size = len(side.pieces)
    token = st.one_of(st.integers(0, size - 1), st.sampled_from(sorted(side.specials.values())))
    natural = stream.map(lambda b: [t for t in side.encode(b) if t >= 0])
    rounds = data.draw(st.lists(st.one_of(natural, st.lists(token, max_size=4)), max_size=8))
    prompt = data.draw(natural) or [side.of[b"T"]]
    context = whole(vocabulary.to_drafter(prompt, []))
    done = list(prompt)
    for fresh in rounds:
        kept, tail = vocabulary.to_drafter(fresh, context)
        assert 0 <= kept <= len(context)
        context = context[:kept] + tail
        done += fresh
    assert context == whole(vocabulary.to_drafter(done, []))
    assert b"".join(spoken(vocabulary, context)) == expected_text(vocabulary, done)


def spoken(vocabulary: VocabularyMap, context: list[int]) -> list[bytes]:
    """A context as bytes, special tokens as the target's names."""
    drafter, target = vocabulary.drafter, vocabulary.target
    if drafter.begins:
        assert context[0] == drafter.bos
        context = context[1:]
    back = {
        vocabulary._back[i]: name for name, i in target.specials.items() if i in vocabulary._back
    }
    pieces = [drafter.piece(token) or f"[{back[token]}]".encode() for token in context]
    first = next((i for i, token in enumerate(context) if drafter.piece(token)), None)
    if first is not None:
        pieces[first] = pieces[first].removeprefix(drafter.prefix)
    return pieces


def expected_text(vocabulary: VocabularyMap, tokens: list[int]) -> bytes:
    target, out = vocabulary.target, b""
    for token in tokens:
        name = target.names.get(token, "")
        out += target.piece(token) or (f"[{name}]" if token in vocabulary._back else name).encode()
    return out.removeprefix(target.prefix)


def test_only_the_end_of_the_context_is_made_anew() -> None:
    vocabulary = pair("byte-level", "sentencepiece")
    side = vocabulary.target
    prompt = side.encode(" ".join(TEXT[:3] * 20).encode())
    context = whole(vocabulary.to_drafter(prompt, []))
    kept, tail = vocabulary.to_drafter(side.encode(b" drafter"), context)
    assert len(context) > 1000 and kept >= len(context) - 2 and 1 <= len(tail) <= 6


def test_the_end_is_made_anew_from_further_back_where_it_has_to_be() -> None:
    """Sixteen tokens back the text is `so…`, and `so` would be one token; but after `'` it is two."""
    vocabulary = VocabularyMap(code_with([("s", "o")]), debug())
    text = vocabulary.target.encode(b"x'so" + 14 * b".")
    context = whole(vocabulary.to_drafter(text, []))
    assert len(context) == len(text)
    kept, tail = vocabulary.to_drafter(text[-1:], context)
    assert (kept, tail) == (len(context), vocabulary.drafter.encode(b"."))


def test_half_a_character_is_taken_back_when_it_is_completed() -> None:
    vocabulary = pair("byte-level", "bytes")
    smile = "😀".encode()
    tokens = vocabulary.target.encode(b"so " + smile)
    context = whole(vocabulary.to_drafter(tokens[:-1], []))
    assert vocabulary.drafter.spell(context) == b"so " + smile[:-1]
    kept, tail = vocabulary.to_drafter(tokens[-1:], context)
    assert kept < len(context)  # its bytes have a token of their own
    assert context[:kept] + tail == vocabulary.drafter.encode(b"so " + smile)
    # and a draft may complete what the target began
    assert vocabulary.to_target(vocabulary.drafter.encode(smile[3:] + b" x"), tokens[:-1]) == [
        *tokens[-1:],
        *vocabulary.target.encode(b" x"),
    ]


@pytest.mark.parametrize(("drafter", "target"), PAIRS)
@quick
@given(before=stream, draft=stream, garbage=st.lists(st.integers(-3, 60000), max_size=5))
def test_a_draft_says_what_was_drafted(
    drafter: str, target: str, before: bytes, draft: bytes, garbage: list[int]
) -> None:
    vocabulary = pair(drafter, target)
    committed = [t for t in vocabulary.target.encode(before) if t >= 0]
    drafts = [t for t in vocabulary.drafter.encode(draft) if t >= 0] + garbage
    tokens = vocabulary.to_target(drafts, committed)
    assert all(0 <= t < len(vocabulary.target.pieces) for t in tokens)
    said = vocabulary.target.spell(tokens)
    assert vocabulary.drafter.spell(drafts).startswith(said)
    if -1 not in vocabulary.target.encode(
        draft
    ):  # at most half a character and what may be one token are held back
        assert len(said) >= len(draft) - 3 - vocabulary.target.longest


@pytest.mark.parametrize(
    ("drafter", "target"),
    [
        *PAIRS,
        ("sentencepiece", "unigram"),
        ("byte-level, bytes missing", "bytes"),
        pytest.param(REAL, "byte-level", marks=pytest.mark.slow),
        pytest.param("byte-level, bytes missing", REAL, marks=pytest.mark.slow),
    ],
)
def test_a_drafter_that_knows_what_follows_is_understood(drafter: str, target: str) -> None:
    """From every place in the text where both have a cut, right drafts come out as the target's own next tokens: all that
    lie before the draft's last word, and nearly all of the others."""
    vocabulary = pair(drafter, target)
    right = wrong = 0
    for line in TEXT[:5]:
        text = line.encode()
        own, drafted = vocabulary.target.encode(text), vocabulary.drafter.encode(text)
        cuts = [len(vocabulary.target.spell(own[:i])) for i in range(len(own))]
        if -1 in drafted:
            continue
        for i in range(1, len(drafted)):
            at = len(vocabulary.drafter.spell(drafted[:i]))
            if at not in cuts:
                continue
            here = cuts.index(at)
            tokens = vocabulary.to_target(drafted[i : i + 6], own[:here])
            agreed = [a == b for a, b in zip(tokens, own[here:], strict=False)]
            words = re.match(rb"(?s).*\S(?=\s+\S)", vocabulary.drafter.spell(drafted[i : i + 6]))
            ends = [len(vocabulary.target.spell(tokens[: n + 1])) for n in range(len(tokens))]
            settled = sum(end <= (words.end() if words else 0) for end in ends)
            assert all(agreed[:settled])
            right, wrong = right + sum(agreed), wrong + agreed.count(False)
    fine = drafter in ("bytes", "unigram")  # six of their tokens are hardly more than a word
    assert right > 100 and wrong <= (0.2 if fine else 0.08) * right, (right, wrong)


def test_the_committed_end_shapes_a_draft() -> None:
    """GPT-2 cuts `'s` off whatever follows it."""
    vocabulary = VocabularyMap(debug(), code_with([("s", "o")]))
    draft = vocabulary.drafter.encode(b"so.")
    quote = vocabulary.target.encode(b"x'")
    assert spelt(vocabulary, vocabulary.to_target(draft, quote)) == [b"s", b"o", b"."]
    assert spelt(vocabulary, vocabulary.to_target(draft, [])) == [b"so", b"."]
    # what stands before a special token is another text
    assert spelt(vocabulary, vocabulary.to_target(draft, [*quote, vocabulary.target.eos])) == [
        b"so",
        b".",
    ]


def test_a_draft_begins_where_the_committed_tokens_end() -> None:
    """Even where the target would have cut across that place: `a` is committed, and `ab` would have been one token."""
    vocabulary = VocabularyMap(debug(), code_with([("a", "b")]))
    committed = [vocabulary.target.of[b"a"]]
    draft = vocabulary.to_target(vocabulary.drafter.encode(b"b ab."), committed)
    assert spelt(vocabulary, draft) == [b"b", b" ", b"ab", b"."]


def spelt(vocabulary: VocabularyMap, tokens: list[int]) -> list[bytes]:
    return [vocabulary.target.piece(token) for token in tokens]


def test_last_tokens_that_may_become_one_are_left_out() -> None:
    vocabulary = VocabularyMap(debug(), code_with([("l", "a"), ("w", "s"), ("la", "ws")]))
    d, t = vocabulary.drafter, vocabulary.target

    def said(data: bytes) -> list[bytes]:
        return spelt(vocabulary, vocabulary.to_target(d.encode(data), []))

    assert said(b"x la") == [b"x", b" "]
    assert said(b"x law") == [b"x", b" "]  # two tokens, which `s` would make one
    assert said(b"x laws") == [b"x", b" ", b"laws"]  # no token is longer
    assert said(b"x la.") == [b"x", b" ", b"la", b"."]
    assert said("é".encode() + "é".encode()[:1]) == ["é".encode()[:1], "é".encode()[1:]]
    # an end that was drafted settles it
    end = vocabulary.to_target([*d.encode(b"x la"), d.eos], [])
    assert spelt(vocabulary, end[:-1]) == [b"x", b" ", b"la"] and end[-1] == t.eos
    # and a token that the drafter has too ended where the drafter ended it
    alike = VocabularyMap(
        code_with([("l", "a")]), code_with([("l", "a"), ("w", "s"), ("la", "ws")])
    )
    assert spelt(alike, alike.to_target(alike.drafter.encode(b"x la"), [])) == [b"x", b" ", b"la"]
    assert spelt(alike, alike.to_target(alike.drafter.encode(b"x law"), [])) == [b"x", b" "]


@pytest.mark.parametrize("kind", EACH_KIND)
def test_the_same_vocabulary_is_the_identity(kind: str) -> None:
    vocabulary = pair(kind, kind)
    assert vocabulary.same
    # cut as no tokenizer would
    odd = [i for i, piece in enumerate(vocabulary.drafter.pieces) if piece][::-3][:50]
    assert vocabulary.to_target(odd, odd[:5]) == odd
    assert vocabulary.to_drafter(odd, [7, 8]) == (2, odd)


def test_other_ids_are_mapped_one_by_one_other_merges_are_not() -> None:
    spec = json.loads(byte_level().backend_tokenizer.to_str())
    names = list(spec["model"]["vocab"])
    spec["model"]["vocab"] = {n: i for i, n in enumerate(reversed(names))}
    turned = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        eos_token="<|end|>",
        bos_token="<|begin|>",
    )
    vocabulary = VocabularyMap(turned, byte_level())
    tokens = byte_level()(TEXT[0])["input_ids"]
    assert vocabulary.same
    assert vocabulary.to_target(turned(TEXT[0])["input_ids"], []) == tokens
    assert vocabulary.to_drafter(tokens, [])[1] == turned(TEXT[0])["input_ids"]
    spec["model"]["merges"].reverse()
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)), eos_token="<|end|>"
    )
    vocabulary = VocabularyMap(other, byte_level())
    assert not vocabulary.same


def test_special_tokens_have_roles_and_text_never_is_one() -> None:
    vocabulary = pair("sentencepiece", "byte-level")
    d, t = vocabulary.drafter, vocabulary.target
    assert vocabulary.to_target([*d.encode(b"so."), d.eos, 5], []) == [*t.encode(b"so."), t.eos]
    written = vocabulary.to_target(d.encode(b"<|end|> or so."), [])
    assert t.eos not in written and t.spell(written) == b"<|end|> or so."
    chat = byte_level()("<|begin|><|turn|>Hello<|end|>")["input_ids"]
    context = whole(vocabulary.to_drafter(chat, []))
    # a mark that the drafter lacks is text to it, the others are its own
    assert context == [d.bos, *d.encode(b" <|turn|>Hello"), d.eos]
    assert d.eos not in whole(vocabulary.to_drafter(t.encode(b"a</s>"), []))


def test_in_a_draft_the_role_decides_in_the_context_the_name() -> None:
    core = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    base = wrap(core, ["<|eot|>"], eos_token="<|eot|>", bos_token="<|begin|>")
    vocabulary = VocabularyMap(base, byte_level())
    assert vocabulary.same
    end, stop = core.token_to_id("<|end|>"), core.token_to_id("<|eot|>")
    assert vocabulary.to_target([stop], []) == [vocabulary.target.eos]
    assert vocabulary.to_drafter([vocabulary.target.eos], []) == (0, [end])


def test_a_context_begins_as_the_drafters_tokenizer_begins_one() -> None:
    from tokenizers import processors

    core = Tokenizer.from_str(sentencepiece().backend_tokenizer.to_str())
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    drafter = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    vocabulary = VocabularyMap(drafter, byte_level())
    for prompt in ("The law", "<|begin|>The law"):
        tokens = byte_level()(prompt)["input_ids"]
        assert whole(vocabulary.to_drafter(tokens, [])) == drafter("The law")["input_ids"]


def test_bytes_that_the_drafter_lacks_are_left_out_and_those_that_the_target_lacks_end_a_draft() -> (
    None
):
    vocabulary = VocabularyMap(digits(), byte_level())
    context = whole(vocabulary.to_drafter(vocabulary.target.encode(b"the ! token"), []))
    assert vocabulary.drafter.spell(context).split() == [b"the", b"token"]
    vocabulary = VocabularyMap(byte_level(), digits())
    drafted = [*vocabulary.drafter.encode(b"the ! token"), vocabulary.drafter.eos]
    assert vocabulary.target.spell(vocabulary.to_target(drafted, [])) == b"the "
    assert vocabulary.target.eos not in vocabulary.to_target(drafted, [])


def test_what_cannot_spell_is_refused() -> None:
    core = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match=r"the drafter's tokenizer \(WordPiece\) can't spell"):
        VocabularyMap(PreTrainedTokenizerFast(tokenizer_object=core), byte_level())
    with pytest.raises(
        UserError, match="the target's tokenizer SimpleNamespace has no fast version"
    ):
        VocabularyMap(byte_level(), SimpleNamespace())
