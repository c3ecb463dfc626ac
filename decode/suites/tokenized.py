"""A suite's prompts as the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from align.common.errors import UserError
from decode.engine.decoder import prompt_tokens
from decode.suites.prompt import Prompt

if TYPE_CHECKING:
    from align.target.model import Target


def tokenize_prompts(
    target: Target, prompts: Sequence[Prompt]
) -> tuple[list[tuple[Prompt, list[int]]], list[str]]:
    """Prompts with their tokens, and a line for each prompt that the target can't take (too long, refused by its template)."""
    fitting, refused = [], []
    for prompt in prompts:
        try:
            fitting.append((prompt, prompt_tokens(target, prompt.content)))
        except UserError as error:
            refused.append(f"{prompt.id}: {error}")
    return fitting, refused
