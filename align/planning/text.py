"""How much text a recipe trains on: as its data folder says, as a pilot measured, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from align.config.recipe import Recipe
from align.data.shards import read_manifest

TOKENS_OF_LIMIT = 0.82
"""Tokens of a sample as a share of its limits: 269k tokens in 1,363 samples of at most 80 + 160
(recipe=smollm2_block)."""
ANSWER_SHARE = 0.7
"""Share of a sample's tokens that are answer: 4,340 of 6,353 with prompts of at most 48 tokens and
answers of at most 112."""
FILL = 0.93
"""Share of a packed row that is text."""


@dataclass(frozen=True)
class TextSize:
    """samples: in all; written: of these, already there. tokens: of a sample on average; answers:
    their share that is answer. kept: share of written samples that is kept. source: how it is
    known."""

    samples: int
    written: int = 0
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


def read_text_size(recipe: Recipe) -> TextSize:
    """From the data folder if there is one, else assumed from the recipe's limits."""
    data, folder = recipe.data, recipe.data_folder
    limit = data.prompt_limit + data.max_answer_tokens
    size = TextSize(
        data.samples,
        tokens=TOKENS_OF_LIMIT * limit,
        source=f"assumed: {TOKENS_OF_LIMIT:.0%} of the limits",
    )
    manifest = read_manifest(folder) if (folder / "manifest.json").is_file() else {}
    if not manifest.get("samples"):
        return size
    found = measure_samples(size, manifest, str(folder))
    return replace(
        found, samples=max(data.samples, manifest["samples"]), written=manifest["samples"]
    )


def measure_samples(size: TextSize, manifest: Mapping[str, Any], source: str) -> TextSize:
    """`size` with the mean length and the shares of the samples that a manifest describes."""
    samples, tokens, answers = (
        manifest["samples"],
        manifest["tokens"],
        manifest.get("answer_tokens"),
    )
    return replace(
        size,
        tokens=tokens / samples,
        answers=answers / tokens if answers else ANSWER_SHARE,
        kept=samples / (samples + sum(manifest.get("dropped", {}).values())),
        source=source,
    )
