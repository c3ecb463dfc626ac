"""The mask is a token that no text has, and LoRA's alpha twice its rank where none is given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from align.makers.geometry import mask_token
from specalign.common.errors import UserError
from tests.tokenizers import smollm2


def target_of(
    vocab: dict[str, int],
    rows: int,
    special: tuple[str, ...] = (),
    ends: tuple[int, ...] = (),
    **roles: Any,
) -> Any:
    """A target with these tokens and as many rows, as far as the choice asks."""
    core = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    config = SimpleNamespace(
        to_dict=lambda: {"image_token_id": 3, "eos_token_id": [*ends], "pad_token_id": None}
    )
    return SimpleNamespace(
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=core, **roles),
        vocab_size=rows, embedding_VD=torch.zeros(rows, 1), eos_ids=ends, placeholder_ids=[], spec="m", config=config,
        model=SimpleNamespace(config=config, generation_config=config),
    )  # fmt: skip


WORDS = {f"w{i}": i for i in range(6)}


def test_an_id_that_no_token_has_comes_first() -> None:
    """Also where the number of tokens is no hint: ids with gaps."""
    gaps = {f"w{i}": i for i in range(99)} | {"<eos>": 127}
    assert mask_token(target_of(gaps, 128, ends=(127,), eos_token="<eos>")) == 126
    assert mask_token(target_of(WORDS, 10)) == 9
    assert mask_token(target_of(WORDS, 10, ends=(9,))) == 8
    some = target_of(WORDS, 10)
    some.embedding_VD = torch.zeros(8, 1)  # fewer rows in front than behind
    assert mask_token(some) == 7


@pytest.mark.parametrize(
    "name",
    ["[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>", "<|reserved_special_token_3|>", "<unused0>", "[unused12]",
     "<|reserved_200017|>", "<reserved_3>", "<|extra_0|>", "<|unused_1|>", "<|dummy_0|>", "<extra_id_4>",
     "<SPECIAL_14>", "[control_8]", "<｜place▁holder▁no▁0｜>"],
)  # fmt: skip
def test_a_token_that_waits_for_a_meaning_comes_next(name: str) -> None:
    """Whether or not it is marked as special, and before other special tokens."""
    vocab = {**WORDS, "<|tool|>": 6, name: 7}
    assert mask_token(target_of(vocab, 8, ("<|tool|>",))) == 7
    assert mask_token(target_of(vocab, 8, ("<|tool|>", name))) == 7


@pytest.mark.parametrize(
    "names",
    [("[TOOL_CALLS]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"), ("<｜fim▁hole｜>", "<｜User｜>"), ("<fim_prefix>", "<fim-suffix>"),
     ("▁<PRE>", "▁<MID>", "▁<SUF>"), ("<|vision_start|>", "<|image_pad|>", "<|audio|>", "<|video_pad|>", "[IMG]")],
)  # fmt: skip
def test_a_token_of_infilling_images_or_tools_is_never_taken(names: tuple[str, ...]) -> None:
    vocab = WORDS | {name: 6 + i for i, name in enumerate(names)}
    with pytest.raises(UserError, match="no unused special token"):
        mask_token(target_of(vocab, len(vocab), names))
    spare = len(vocab)
    both = (*names, "<SPECIAL_14>", "<SPECIAL_15>")
    vocab |= {name: spare + i for i, name in enumerate(both[-2:])}
    assert mask_token(target_of(vocab, len(vocab), both)) == spare


def test_a_token_in_use_is_never_taken() -> None:
    """Ends, roles, ids of the config, tokens of any chat template, ends of texts by their names; nor one that is no special token."""
    names = ["<|a|>", "<|b|>", "<|c|>", "<|endoftext|>", "<|im_end|>", "</s>"]
    vocab = {**WORDS, **{name: 6 + i for i, name in enumerate(names)}}
    del vocab["w3"]
    vocab["<|image|>"] = 3
    some = target_of(vocab, 12, (*names, "<|image|>"), ends=(6,), pad_token="<|b|>")
    assert mask_token(some) == 8
    some.tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "<|c|>"}
    with pytest.raises(UserError, match="no unused special token .* drafter.mask_token_id=ID"):
        mask_token(some)
    with pytest.raises(UserError, match="no unused special token"):
        mask_token(target_of(WORDS, 6))


def test_the_choice_for_smollm2_stays() -> None:
    """The shipped drafter was trained with it."""
    tokenizer = smollm2()
    some = target_of(WORDS, 49152, ends=(2,))
    some.tokenizer, some.config.to_dict = tokenizer, dict
    assert mask_token(some) == 3 and tokenizer.convert_ids_to_tokens(3) == "<repo_name>"


def test_what_a_template_puts_together_is_in_use() -> None:
    """Phi-4-mini's template writes `<|` and the role: no token's text stands in its source. Thoughts and calls are texts as well."""
    roles = ("<|user|>", "<|assistant|>", "<|system|>", "<think>", "<tool_call>")
    vocab = WORDS | {name: 6 + i for i, name in enumerate((*roles, "<spare>"))}
    made = target_of(vocab, 12, special=(*roles, "<spare>"))
    made.tokenizer.chat_template = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}{{ '<|' + 'assistant' + '|>' }}"
    assert made.tokenizer.convert_ids_to_tokens(mask_token(made)) == "<spare>"
