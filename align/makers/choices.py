"""What a recipe leaves open, chosen by the target: the mask's token; and by its own other keys."""

from __future__ import annotations

from align.common.errors import UserError
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
