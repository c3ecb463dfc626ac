"""How much text a recipe trains on: as its data folder says where there is one, as a pilot measured, or assumed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from align.common.schema import read_object
from align.config.recipe import Recipe

TOKENS_OF_LIMIT = 0.82
"""Of a sample's longest prompt and answer, what it takes with its template: 269k tokens in 1,363 samples of 80 + 160
(recipe=smollm2_block, docs/results.md)."""
ANSWER_SHARE = 0.7
"""Of a sample's tokens, those of the answer: 4,340 of 6,353 where prompts had 48 and answers 112 at most."""
FILL = 0.93
"""Of a packed row, what first fit fills: the part of a row that is text where samples take a third of it."""


@dataclass(frozen=True)
class TextSize:
    """samples: to be written in all; there: of these, already there. tokens: of a sample, in the mean; answers: their share that is
    answer. kept: share of the written samples that is kept (the others are too long, empty or were said before). source: how it is
    known."""

    samples: int
    there: int = 0
    tokens: float = 0.0
    answers: float = ANSWER_SHARE
    kept: float = 1.0
    source: str = ""

    @property
    def total(self) -> float:
        """Tokens in all."""
        return self.samples * self.tokens

    def rows(self, length: int) -> int:
        """Packed rows."""
        return max(1, ceil(self.total / (FILL * length)))


def text_size(recipe: Recipe) -> TextSize:
    """From the data folder, or assumed from the recipe's limits."""
    d, manifest = recipe.data, recipe.data_folder / "manifest.json"
    longest = d.prompt_limit + d.max_answer_tokens
    assumed = f"{TOKENS_OF_LIMIT:.0%} of the longest prompt and answer, as SmolLM2 wrote"
    size = TextSize(d.samples, 0, TOKENS_OF_LIMIT * longest, source=assumed)
    if not manifest.is_file():
        return size
    found = read_object(manifest)
    samples, tokens = int(found.get("samples") or 0), int(found.get("tokens") or 0)
    if not samples:
        return size
    answers = int(found.get("answer_tokens") or 0) / tokens if found.get("answer_tokens") else ANSWER_SHARE
    dropped = sum(int(n) for n in (found.get("dropped") or {}).values())
    return replace(
        size,
        samples=max(d.samples, samples),
        there=samples,
        tokens=tokens / samples,
        answers=answers,
        kept=samples / (samples + dropped),
        source=f"{manifest}",
    )
