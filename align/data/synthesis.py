"""The target writes its training data: batches of prompts and answers, resumable after a kill."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from align.config.recipe import Recipe
from align.data import shards as data
from align.data.batches import Batches
from align.data.identity import identity, is_same
from align.data.index import ShardFolder
from align.data.prompts import read_prompts
from align.writing.generation import Writer
from align.writing.journal import forget_until
from align.writing.progress import WritingProgress
from align.writing.rows import Plan, Progress, Source, ignore_progress
from align.writing.survey import survey_prompts
from align.writing.template import TargetInfo, chat_template
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.folder.clock import note_clock
from specalign.lm.model import Target

FRUITLESS_BATCHES = 20
"""In a row, all of whose samples were dropped, after which the writing stops."""


def _resume(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The folder's manifest if it was written with these settings; a fresh one if there is none, or
    no sample of other settings was kept."""
    counts = {"shards": 0, "samples": 0, "tokens": 0, "answer_tokens": 0}
    fresh = {**wanted, **counts, "dropped": {}, "finished": False, "sha256": []}
    if not (folder / "manifest.json").exists():
        return fresh
    manifest = data.read_manifest(folder)
    for key, value in wanted.items():
        if is_same(manifest, key, value):
            continue
        if manifest["shards"] and not manifest["samples"]:
            forget_until(folder, manifest["shards"])
            return fresh
        raise UserError(
            f"{folder}/manifest.json: {key} is {manifest.get(key)!r}, this recipe says {value!r}; "
            "give the data.… keys that it was written with, or another data.path"
        )
    if manifest.get("target_sha256") is None:
        manifest["target_sha256"] = wanted["target_sha256"]
    return {**fresh, **manifest}


class Synthesis:
    """The writing of one folder, a shard at a time. Raises UserError: a folder written with other
    settings, prompts that can't be read, a server that can't be used."""

    def __init__(
        self, recipe: Recipe, target: TargetInfo, folder: Path, quiet: bool = False
    ) -> None:
        d = recipe.data
        self.recipe, self.folder, self.quiet, self.fruitless = recipe, folder, quiet, 0
        exists = (folder / "manifest.json").exists()
        date = data.read_manifest(folder).get("date") if exists else None
        template = chat_template(target, date)
        self.prompts = None
        if d.prompts:
            self.prompts = read_prompts(
                d.prompts, d.prompts_split, d.prompts_column, d.prompts_config, d.prompts_revision
            )
        self.manifest = _resume(folder, identity(recipe, target, template, self.prompts))
        plan = Plan(recipe, target, template, self.prompts)
        self.expected = d.samples if self.done else self._survey(plan)
        self.batches = Batches(plan, self._open_source)
        if d.server is not None and not exists:
            _ = self.batches.source  # it has to be reachable before anything is written
            data.write_manifest(folder, self.manifest)  # settings of the first stored answers
        self._restore()
        forget_until(folder, self.manifest["shards"] - 1)  # a kill may have come before this

    def _open_source(self, plan: Plan) -> Source:
        if self.recipe.data.server is not None:
            from align.writing.served import Served  # imports the client, which is slow

            return Served(plan, self.folder, self.quiet)
        assert isinstance(plan.target, Target)
        return Writer(plan.target, plan)

    def close(self) -> None:
        """End running requests and processes."""
        self.batches.close()

    @property
    def done(self) -> bool:
        """Whether all samples are written."""
        return bool(self.manifest["samples"] >= self.recipe.data.samples)

    def write_shard(self, progress: Progress = ignore_progress) -> bool:
        """Write the next shard; False if the prompts have ended. Raises UserError: settings under
        which nothing is kept."""
        manifest, folder = self.manifest, self.folder
        dropped = Counter(manifest["dropped"])
        room = self.recipe.data.samples - manifest["samples"]
        samples = self.batches.write(manifest["shards"], room, dropped, progress)
        if samples is None:
            manifest["ended"] = True
            data.write_manifest(folder, manifest)
            return False
        sha256 = data.write_shard(folder, manifest["shards"], samples)
        manifest["shards"] += 1
        manifest["dropped"] = dict(sorted(dropped.items()))
        _count(manifest, samples, sha256)
        manifest |= self.batches.source.about
        manifest["finished"] = self.done
        data.write_manifest(folder, manifest)
        self.batches.source.forget(manifest["shards"] - 1)
        self.fruitless = 0 if len(samples) or self.prompts else self.fruitless + 1
        if self.fruitless == FRUITLESS_BATCHES:
            raise UserError(
                f"{folder}: nothing of {FRUITLESS_BATCHES} batches in a row was kept (dropped so "
                f"far: {_list_counts(dropped)}); data.near_duplicate_threshold, "
                "data.prompt_temperature, data.max_prompt_tokens and data.writer decide, or give "
                "prompts (data.prompts)"
            )
        return True

    def _survey(self, plan: Plan) -> int:
        """Report what the template adds to the prompts, and what of given ones is left out or cut.

        Returns:
            How many samples can be written: `data.samples`, or the number of usable prompts.

        Raises:
            UserError: none can be used.
        """
        notes: list[str] = []
        expected = plan.recipe.data.samples
        if plan.prompts is not None:
            usable, notes = survey_prompts(plan.reader, plan.prompts)
            expected = min(expected, usable)
        if not self.quiet:
            for note in notes:
                say(f"note: {note}", error=True)
            note_clock(plan.target, str(self.folder), plan.template.date)
        return expected

    def _restore(self) -> None:
        """Write missing and damaged shards again, and have `batches` remember the texts of all."""
        manifest, batches = self.manifest, self.batches
        shards = ShardFolder(self.folder, manifest, batches.plan.target.vocab_size)
        damaged: set[int] = set()
        for number in range(len(shards)):
            try:
                _ = shards[number]
            except UserError as error:
                damaged.add(number)
                if not self.quiet:
                    say(f"written again: {error}")
        if not damaged and self.done:
            return
        restored = {**manifest, "samples": 0, "tokens": 0, "answer_tokens": 0, "sha256": []}
        for number, sha256 in enumerate(manifest["sha256"]):
            if number in damaged:
                room = self.recipe.data.samples - restored["samples"]
                samples = batches.write(number, room, Counter())
                assert samples is not None  # it was written before
                sha256 = data.write_shard(self.folder, number, samples)
            else:
                samples = shards[number]
                batches.remember(samples)
            _count(restored, samples, sha256)
        manifest |= restored
        if damaged:
            data.write_manifest(self.folder, manifest)


def synthesize(
    recipe: Recipe, target: TargetInfo, folder: Path, quiet: bool = False
) -> dict[str, Any]:
    """Write `recipe.data.samples` samples into `folder`, resuming from what is there; returns the
    manifest. Missing or damaged shards are written again first: their content depends on the seed
    and their number alone. Raises UserError: a folder written with other settings, prompts that
    can't be read, or settings under which nothing is kept."""
    d = recipe.data
    with closing(Synthesis(recipe, target, folder, quiet)) as writing:
        manifest = writing.manifest
        samples, tokens = manifest["samples"], manifest["tokens"]
        if samples and not quiet:
            state = "is finished" if writing.done else f"continues to {d.samples} samples"
            say(f"{folder} {state}: {samples} samples, {tokens} tokens exist")
        if writing.done:
            return manifest
        start = time.monotonic()
        progress = WritingProgress(writing.expected, samples, quiet)
        while not writing.done and writing.write_shard(progress.count):
            progress.save(manifest["samples"], d.batch_size)
    dropped = _list_counts(manifest["dropped"])
    if not manifest["samples"]:
        raise UserError(
            f"{folder}: data.prompts={d.prompts!r} gave no sample (texts left out: {dropped})"
        )
    if not quiet:
        rate = (manifest["tokens"] - tokens) / max(time.monotonic() - start, 1e-9)
        say(
            f"{manifest['samples']} samples, {manifest['tokens']} tokens in {folder} "
            f"({rate:.0f} kept tokens/s; texts left out: {dropped})"
        )
        if manifest["samples"] < d.samples:
            say(f"note: the prompts ended after {manifest['samples']} of {d.samples} samples")
    return manifest


def _count(manifest: dict[str, Any], samples: data.Samples, sha256: str) -> None:
    manifest["sha256"].append(sha256)
    manifest["samples"] += len(samples)
    manifest["tokens"] += len(samples.tokens)
    manifest["answer_tokens"] += len(samples.tokens) - int(samples.answer_start.sum())


def _list_counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none"
