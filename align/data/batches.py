"""The batches of prompts and answers by number, without what is broken or was said before."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from align.common.text import plural, say
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.near_duplicates import NearDuplicates, journal_of
from align.writing.generation import Row
from align.writing.rows import Plan, Progress, Source, ignore_progress

MakeSource = Callable[[Plan], Source]
"""Opens who writes the rows of a plan."""


def with_folder_batch(recipe: Recipe, folder: Path, quiet: bool = False) -> Recipe:
    """The recipe with the batch size that the folder was begun with: what is in a shard depends on it, so that it never changes.
    A note names it where samples are still to be written."""
    if not (folder / "manifest.json").exists():
        return recipe
    manifest, d = data.read_manifest(folder), recipe.data
    begun = manifest.get("batch_size")
    if not isinstance(begun, int) or begun < 1 or begun == d.batch_size:
        return recipe
    if manifest["samples"] < d.samples and not quiet:
        say(
            f"note: {folder} was begun with {plural(begun, 'row')} at a time and continues so (data.batch_size={d.batch_size} needs "
            "another data.path)",
            error=True,
        )
    return replace(recipe, data=replace(d, batch_size=begun))


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
        starts = samples.text_start
        for i in range(len(samples)):
            text_start = len(self.template.prefix) if starts is None else int(starts[i])
            self.seen.add(self._text_key(samples[i].tolist(), int(samples.answer_start[i]), text_start))

    def write(
        self, number: int, room: int, dropped: Counter[str], progress: Progress = ignore_progress
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
            elif not self.seen.add(self._text_key(row.tokens, row.answer_start, row.text_start)):
                dropped["near-duplicate"] += 1
            elif not full:
                chosen.append(row)
        if full:
            self.seen.forget()
        samples = data.from_lists(
            [r.tokens for r in chosen],
            [r.answer_start for r in chosen],
            [r.answer_temperature for r in chosen],
        )
        starts = [row.text_start for row in chosen]
        if all(start == len(self.template.prefix) for start in starts):
            return samples
        return replace(samples, text_start=torch.tensor(starts))

    def _text_key(self, tokens: list[int], answer_start: int, text_start: int) -> list[int]:
        """What near-duplicates are judged by: the prompt from the first user text on, or a base text's first 64 tokens.

        A system prompt and tools that many prompts share count for nothing; prompts behind different ones are never near.
        """
        end = answer_start if answer_start > text_start else text_start + 64
        lead, text = tokens[:text_start], tokens[text_start:end]
        if lead == list(self.template.prefix):
            return text
        digest = hashlib.sha256(json.dumps(lead).encode()).digest()
        mask = int.from_bytes(digest[:4], "little") % (1 << _TOKEN_BITS)
        return [token ^ mask for token in text]


_TOKEN_BITS = 20
"""Of the numbers that near-duplicates are compared by, which have room for 21."""


def _shards_key(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest["sha256"]).encode()).hexdigest()
