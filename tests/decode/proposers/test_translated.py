"""A drafter with another vocabulary: right drafts stay right in the target's tokens, and the output is plain decoding's."""

import pytest

from decode import Decoder, Sampling
from decode.proposers.translated import TranslatedProposer, Translator
from specalign.lm.model import Target
from tests.builders import smaller_model as smaller
from tests.tokenizers import KINDS, TEXT, debug

PAIRS = [
    ("sentencepiece", "byte-level"),
    ("byte-level", "sentencepiece"),
    ("sentencepiece, legacy", "bytes"),
    ("byte-level, space in front", "byte-level"),
    ("bytes", "byte-level"),
]


@pytest.mark.parametrize(("drafter", "target"), PAIRS)
def test_right_drafts_are_right_in_the_targets_tokens(drafter: str, target: str) -> None:
    """Of each text's continuation in drafter tokens, all but the last word comes out as the target writes it."""
    translator = Translator(KINDS[drafter](), KINDS[target]())
    right = drafted = 0
    for text in TEXT:
        tokens = translator.target(text, add_special_tokens=False)["input_ids"]
        every = translator.to_drafter(tokens)
        for at in range(1, len(tokens) - 4, 3):
            context = translator.to_drafter(tokens[:at])
            if every[: len(context)] != context:
                continue  # the context ends inside a drafter token
            drafts = every[len(context) : len(context) + 12]
            found = translator.to_target(tokens[:at], context, drafts)[:-1]
            wanted = tokens[at : at + len(found)]
            right += next((i for i, t in enumerate(found) if t != wanted[i]), len(found))
            drafted += len(found)
    assert drafted > 100 and right > 0.7 * drafted


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece, legacy", "unigram"])
def test_the_output_is_plain_decodings(target: Target, kind: str) -> None:
    """The random target also says bytes that are no text, halves of characters and special tokens."""
    tokenizer = KINDS[kind]()
    network = smaller(target, vocab_size=len(tokenizer))
    drafter = TranslatedProposer(network, tokenizer, target, 5)
    for sampling in (Sampling(), Sampling(repetition_penalty=1.4)):
        out = Decoder(target, drafter).generate("Say a word.", 20, sampling=sampling)
        assert out.tokens == Decoder(target).generate("Say a word.", 20, sampling=sampling).tokens


def test_a_network_that_is_the_target_is_right_and_stays_within_its_context(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "eos_ids", ())
    monkeypatch.setattr("decode.proposers.translated.LONGEST_CONTEXT", 24)
    decoder = Decoder(target, TranslatedProposer(target, debug(), target, 4))
    out = decoder.generate([4, 90, 17], max_new_tokens=60)
    assert out.tokens == Decoder(target).generate([4, 90, 17], max_new_tokens=60).tokens
    assert out.accepted[:3] == [4, 4, 4]
