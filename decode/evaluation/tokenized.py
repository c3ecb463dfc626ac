"""Tokenizes a suite's prompts for the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode.engine.prompts import prompt_tokens
from specalign.common.errors import UserError
from specalign.common.text import plural
from specalign.suites.prompt import Prompt
from specalign.suites.sources import Loaded

if TYPE_CHECKING:
    from specalign.lm.model import Target

TokenizedPrompts = list[tuple[Prompt, list[int]]]


def tokenize_prompts(
    target: Target, prompts: Sequence[Prompt]
) -> tuple[TokenizedPrompts, list[str]]:
    """Prompts with their tokens, and a line for each one that the target can't take (too long,
    refused by its template)."""
    fitting: TokenizedPrompts = []
    refused: list[str] = []
    for prompt in prompts:
        try:
            fitting.append((prompt, prompt_tokens(target, prompt.content)))
        except UserError as error:
            refused.append(f"{prompt.id}: {error}")
    return fitting, refused


def tokenize_suites(
    target: Target, suites: Sequence[Loaded]
) -> tuple[dict[str, TokenizedPrompts], list[str]]:
    """Each suite's prompts with their tokens, and a line for each suite with prompts that the
    target can't take. Raises UserError if it can take none."""
    tokenized: dict[str, TokenizedPrompts] = {}
    lines: list[str] = []
    for suite in suites:
        tokenized[suite.name], refused = tokenize_prompts(target, suite.prompts)
        if refused:
            count = f"{len(refused)} of {plural(len(suite.prompts), 'prompt')}"
            lines.append(
                f"{suite.name}: {count} can't be used with this target; the first is {refused[0]}"
            )
    if not any(tokenized.values()):
        raise UserError(f"no prompt can be answered: {lines[0]}")
    return tokenized, lines
