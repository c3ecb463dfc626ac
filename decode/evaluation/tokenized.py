"""A suite's prompts as the target's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode.engine.prompts import prompt_tokens
from specalign.common.errors import UserError
from specalign.common.text import say_once
from specalign.folder.template_notes import ignored_notes
from specalign.suites.prompt import Prompt

if TYPE_CHECKING:
    from specalign.lm.model import Target


def tokenize_prompts(
    target: Target, prompts: Sequence[Prompt]
) -> tuple[list[tuple[Prompt, list[int]]], list[str]]:
    """Prompts with their tokens, and a line for each one that the target can't take (too long,
    refused by its template). Prints notes on what its chat template leaves out."""
    fitting, refused, ignored = [], [], Counter[str]()
    for prompt in prompts:
        try:
            fitting.append((prompt, prompt_tokens(target, prompt.content, ignored=ignored)))
        except UserError as error:
            refused.append(f"{prompt.id}: {error}")
    for note in ignored_notes(target, ignored, str(len(prompts))):
        say_once(f"note: {note}")
    return fitting, refused
