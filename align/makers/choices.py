"""What a recipe leaves open, chosen by the target: the mask's token; and by its own other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from align.common.errors import UserError
from align.common.text import say
from align.config.drafter import DrafterConfig
from align.target.model import Target


def mask_token(target: Target) -> int:
    """A row of the frozen embedding that text never uses: a padding row, else an unused special token.

    Raises:
        UserError: the vocabulary has neither (name one with drafter.mask_token_id).
    """
    tokenizer = target.tokenizer
    if target.vocab_size > len(tokenizer):
        return target.vocab_size - 1
    taken = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        *target.eos_ids,
    }
    template = str(getattr(tokenizer, "chat_template", "") or "")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for index, token in sorted(added.items()):
        if index not in taken and index < target.vocab_size and str(token) not in template:
            return int(index)
    raise UserError(
        f"target {target.spec!r} has no unused special token for the mask; name one: drafter.mask_token_id=ID"
    )


def lora_alpha(options: DrafterConfig) -> float:
    """The scale of low-rank updates."""
    return 2.0 * options.lora_rank if options.lora_alpha is None else options.lora_alpha


def say_kept(options: DrafterConfig, has: Mapping[str, Any], asked: Mapping[str, Any] | None = None) -> None:
    """Say what the recipe asks for and `drafter.init` has otherwise. No error: a recipe that this one is based on may have set it.

    Args:
        has: what the drafter has, by the option's name.
        asked: what stands for an option where it is not what the recipe says word by word.
    """
    default, asked = DrafterConfig(), asked or {}
    words = {name: asked.get(name, getattr(options, name)) for name in has}
    passed_over = [name for name in has if words[name] not in (getattr(default, name), has[name])]
    if passed_over:
        own, other = (", ".join(f"{name}={values[name]}" for name in passed_over) for values in (has, words))
        say(f"note: drafter.init={options.init} keeps its own {own}; the recipe asks for {other}", error=True)
