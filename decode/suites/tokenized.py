"""A suite's prompts as the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from align.common.errors import UserError
from decode.engine.decoder import Decoder, prompt_tokens
from decode.suites.prompt import Prompt


def tokenize_prompts(
    decoder: Decoder, prompts: Sequence[Prompt]
) -> tuple[list[tuple[Prompt, list[int]]], list[str]]:
    """Prompts with their tokens, and a line for each that was left out (longer than the context, refused)."""
    fitting, refused = [], []
    for prompt in prompts:
        try:
            fitting.append((prompt, prompt_tokens(decoder.target, prompt.content)))
        except UserError as error:
            refused.append(f"{prompt.id}: {error}")
    return fitting, refused
