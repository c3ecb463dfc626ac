"""The batches of prompts and answers by number, without what is broken or was said before."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from align.data import shards as data
from align.data.near_duplicates import NearDuplicates, journal_of
from align.writing.generation import Row
from align.writing.rows import Plan, Progress, Source, unheard

MakeSource = Callable[[Plan], Source]
"""Opens who writes the rows of a plan."""


class Batches:
    """The target's batches by number, without what is broken or was said before."""

    def __init__(self, plan: Plan, folder: Path, source: MakeSource) -> None:
        self.plan, self.recipe, self.target, self.template = plan, plan.recipe, plan.target, plan.template
        self.folder, self._make = folder, source

    @cached_property
    def source(self) -> Source:
        """Who writes, asked for where something is to be written."""
        return self._make(self.plan)

    def close(self) -> None:
        if "source" in vars(self):
            self.source.close()
        if journal_of(self._remembered).exists():  # a killed process left it
            self.seen.close()

    @property
    def _remembered(self) -> Path:
        return self.folder / "near-duplicates.sqlite"

    @cached_property
    def seen(self) -> NearDuplicates:
        """What was said before, in all shards."""
        return NearDuplicates(self.recipe.data.near_duplicate_threshold, self._remembered)

    def know(self, manifest: dict[str, Any]) -> bool:
        """Whether the texts of these shards, and no others, are remembered from the last time."""
        return self.seen.holds(_shards_key(manifest))

    def keep(self, manifest: dict[str, Any]) -> None:
        """Remember, for the next time too, what the batches of these shards hold."""
        self.seen.keep(_shards_key(manifest))

    def remember(self, samples: data.Samples) -> None:
        """Samples that are written: what is near to them is dropped."""
        for tokens, start in zip(
            map(samples.__getitem__, range(len(samples))), samples.answer_start, strict=True
        ):
            self.seen.add(_text_key(tokens.tolist(), int(start), len(self.template.prefix)))

    def write(
        self, number: int, room: int, dropped: Counter[str], progress: Progress = unheard
    ) -> data.Samples | None:
        """At most `room` samples of a batch, those of the batches before it being known; None after the last prompt.

        `dropped` counts why rows are left out.
        """
        rows = self.source.write(number, room, progress)
        if rows is None:
            return None
        chosen: list[Row] = []
        full = False
        for row in rows:
            if not full and len(chosen) >= room:
                self.seen.mark()  # a later run, which wants more, knows of what is in the shards alone
                full = True
            if row.broken:
                dropped[row.broken] += 1
            elif not self.seen.add(_text_key(row.tokens, row.answer_start, len(self.template.prefix))):
                dropped["near-duplicate"] += 1
            elif not full:
                chosen.append(row)
        if full:
            self.seen.forget()
        return data.from_lists(
            [r.tokens for r in chosen],
            [r.answer_start for r in chosen],
            [r.answer_temperature for r in chosen],
        )


def _shards_key(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest["sha256"]).encode()).hexdigest()


def _text_key(tokens: list[int], answer_start: int, prefix: int) -> list[int]:
    """The part of a sample that near-duplicates are judged by: its prompt, or a base text's first 64 tokens."""
    return tokens[prefix:answer_start] if answer_start > prefix else tokens[prefix : prefix + 64]
