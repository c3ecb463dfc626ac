"""The mask is a token that no text has, and LoRA's alpha twice its rank where none is given."""

from __future__ import annotations

from align.makers.choices import lora_alpha, mask_token
from align.target.model import Target
from tests.builders import block_options as options


def test_mask_token_is_unused(target: Target) -> None:
    assert target.tokenizer.convert_ids_to_tokens(mask_token(target)) in ("<unused>", "<|endoftext|>")


def test_lora_alpha_is_twice_the_rank() -> None:
    assert lora_alpha(options(lora_rank=4)) == 8 and lora_alpha(options(lora_rank=4, lora_alpha=3.0)) == 3
