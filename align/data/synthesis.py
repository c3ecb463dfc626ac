"""The target writes its own training data: batches of prompts and answers, resumable after a kill."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from align.common.errors import UserError
from align.common.files import sha256_file
from align.common.text import say
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.batches import Batches, MakeSource, with_folder_batch
from align.data.identity import identity, is_same
from align.data.index import ShardFolder
from align.data.prompts import read_prompts
from align.folder.readings import note_readings
from align.target.model import Target
from align.writing.in_process import InProcess
from align.writing.journal import forget_until
from align.writing.progress import WritingProgress
from align.writing.rows import Plan, Progress, Source, ignore_progress
from align.writing.survey import describe_survey, survey_prompts
from align.writing.template import TargetInfo, chat_template


def _date(folder: Path) -> str | None:
    """The date that the samples of a folder say, where it has some."""
    if not (folder / "manifest.json").exists():
        return None
    return data.read_manifest(folder).get("date")


def _resume(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The manifest to go on from: the folder's own, when it was written with the same settings; a fresh one where there is none, or
    where none of what other settings wrote was kept."""
    nothing = {"shards": 0, "samples": 0, "tokens": 0, "answer_tokens": 0, "dropped": {}, "finished": False}
    nothing |= {"sha256": []}
    if not (folder / "manifest.json").exists():
        return wanted | nothing
    manifest = data.read_manifest(folder)
    for key, value in wanted.items():
        if not is_same(manifest, key, value):
            if manifest["shards"] and not manifest["samples"]:
                forget_until(folder, manifest["shards"])
                return wanted | nothing
            raise UserError(
                f"{folder}/manifest.json: {key} is {manifest.get(key)!r}, this recipe says {value!r}; "
                "give the data.… keys that it was written with, or another data.path"
            )
    if manifest.get("target_sha256") is None:
        manifest["target_sha256"] = wanted["target_sha256"]
    return {**wanted, **nothing, **manifest}


FRUITLESS = 20
"""Batches in a row of which nothing is kept, after which the writing stops."""


class Synthesis:
    """The writing of one folder, a shard at a time.

    Args:
        source: who writes the rows; None = the server that the recipe names, else the target, in this process.

    Raises:
        UserError: a folder written with other settings, prompts that can't be read, a server that can't be used.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: TargetInfo,
        folder: Path,
        quiet: bool = False,
        source: MakeSource | None = None,
    ) -> None:
        recipe = with_folder_batch(recipe, folder, quiet)
        d = recipe.data
        self.recipe, self.folder, self.quiet, self.fruitless = recipe, folder, quiet, 0
        template = chat_template(target, _date(folder))
        self.prompts = None
        if d.prompts:
            self.prompts = read_prompts(
                d.prompts, d.prompts_split, d.prompts_column, d.prompts_config, d.prompts_revision
            )
        self.manifest = _resume(folder, identity(recipe, target, template, self.prompts))
        plan = Plan(recipe, target, template, self.prompts)
        self.expected = d.samples if self.done else _note_prompts(plan, folder, quiet)
        self.batches = Batches(plan, folder, source or partial(self._source, target))
        if recipe.data.server is not None and not (folder / "manifest.json").exists():
            _ = self.batches.source  # it has to be there before anything is written
            data.write_manifest(folder, self.manifest)  # the settings of the first answers that are kept
        _mend(folder, self.manifest, self.batches, quiet)
        forget_until(folder, self.manifest["shards"] - 1)  # killed between a shard and this

    def _source(self, target: TargetInfo, plan: Plan) -> Source:
        if self.recipe.data.server is None:
            assert isinstance(target, Target)
            return InProcess(plan, target)
        from align.writing.served import Served

        return Served(plan, self.folder, self.quiet)

    def close(self) -> None:
        """End what still runs: requests, processes."""
        self.batches.close()

    @property
    def done(self) -> bool:
        """Whether all samples are there."""
        return bool(self.manifest["samples"] >= self.recipe.data.samples)

    def write_shard(self, progress: Progress = ignore_progress) -> bool:
        """Write the next shard; False where the prompts have ended.

        Raises:
            UserError: settings under which nothing is kept.
        """
        manifest, folder, wanted = self.manifest, self.folder, self.recipe.data.samples
        dropped = Counter(manifest["dropped"])
        samples = self.batches.write(manifest["shards"], wanted - manifest["samples"], dropped, progress)
        if samples is None:
            manifest["ended"] = True
            data.write_manifest(folder, manifest)
            return False
        manifest["sha256"].append(data.write_shard(folder, manifest["shards"], samples))
        manifest["shards"] += 1
        manifest["dropped"] = dict(sorted(dropped.items()))
        _count(manifest, samples)
        manifest |= self.batches.source.about
        manifest["finished"] = self.done
        data.write_manifest(folder, manifest)
        self.batches.keep(manifest)
        self.batches.source.forget(manifest["shards"] - 1)
        self.fruitless = 0 if len(samples) or self.prompts else self.fruitless + 1
        if self.fruitless == FRUITLESS:
            theirs = all(reason.endswith("in the server's reply") for reason in dropped)
            decide = (
                "another server may do (data.writer)"
                if theirs
                else "data.near_duplicate_threshold, data.prompt_temperature and data.max_prompt_tokens decide, or give prompts (data.prompts)"
            )
            raise UserError(
                f"{folder}: nothing of {FRUITLESS} batches in a row was kept (dropped so far: {_counts(dropped)}); {decide}"
            )
        return True


def synthesize(
    recipe: Recipe, target: TargetInfo, folder: Path, quiet: bool = False, source: MakeSource | None = None
) -> dict[str, Any]:
    """Write `recipe.data.samples` samples into `folder`, going on from what is there; returns the manifest. `source`: see `Synthesis`.

    A shard that is missing or damaged is written again first: its text depends on the seed and its number alone.

    Raises:
        UserError: a folder written with other settings, prompts that can't be read, or settings under which nothing is kept.
    """
    with closing(Synthesis(recipe, target, folder, quiet, source)) as writing:
        return _written(writing)


def _written(writing: Synthesis) -> dict[str, Any]:
    """The manifest after all shards are written, with a word on each step."""
    d, folder, quiet, manifest = writing.recipe.data, writing.folder, writing.quiet, writing.manifest
    if writing.done:
        if not quiet:
            say(f"{folder} is finished: {manifest['samples']} samples, {manifest['tokens']} tokens")
        return manifest
    start, tokens_before = time.monotonic(), manifest["tokens"]
    if writing.prompts is not None and len(writing.prompts) < d.samples and not quiet:
        say(
            f"note: data.prompts={d.prompts!r} holds {len(writing.prompts)} prompts: at most as many of the {d.samples} samples "
            "(data.samples) can be written"
        )
    if manifest["samples"] and not quiet:
        say(f"going on in {folder}: {manifest['samples']} of {d.samples} samples are there")
    longest = d.prompt_limit * (d.prompts is None) + d.max_answer_tokens
    with WritingProgress(writing.expected, manifest["samples"], quiet, longest) as progress:
        while not writing.done and writing.write_shard(progress.count):
            progress.samples_done(manifest["samples"], d.batch_size)
    seconds = time.monotonic() - start
    if not quiet:
        written = manifest["tokens"] - tokens_before
        say(
            f"{manifest['samples']} samples, {manifest['tokens']} tokens in {folder} "
            f"({written / max(seconds, 1e-9):.0f} kept tokens/s; texts left out: {_counts(manifest['dropped'])})"
        )
    if not manifest["samples"] and writing.prompts is not None:
        raise UserError(
            f"{folder}: none of the {len(writing.prompts)} prompts of data.prompts={d.prompts!r} gave a sample "
            f"(texts left out: {_counts(manifest['dropped'])})"
        )
    if manifest["samples"] < d.samples and writing.prompts is not None and not quiet:
        say(f"note: the prompts ended after {manifest['samples']} of {d.samples} samples")
    return manifest


def _note_prompts(plan: Plan, folder: Path, quiet: bool) -> int:
    """Print what the template reads besides the prompts, and what of given ones is left out or cut.

    Returns:
        How many samples can be written: `data.samples`, or the number of usable prompts if that is smaller.

    Raises:
        UserError: none can be used.
    """
    notes, expected = list[str](), plan.recipe.data.samples
    if plan.prompts is not None:
        survey = survey_prompts(plan.reader, plan.prompts)
        notes = describe_survey(plan.reader, survey, len(plan.prompts))
        expected = min(expected, survey.usable)
    if not quiet:
        for note in notes:
            say(f"note: {note}", error=True)
        note_readings(plan.target, str(folder), plan.template.date)
    return expected


def _mend(folder: Path, manifest: dict[str, Any], batches: Batches, quiet: bool) -> None:
    """Write shards again that are missing or not as they were, and have `batches` know what all of them hold."""
    shards, broken = ShardFolder(folder, manifest, batches.target.vocab_size), set[int]()
    for number in range(len(shards)):
        try:
            _ = shards[number]
        except UserError as error:
            broken.add(number)
            if not quiet:
                say(f"written again: {error}")
    complete = not broken and len(manifest["sha256"]) == len(shards)
    if not broken and (
        manifest["samples"] >= batches.recipe.data.samples or complete and batches.know(manifest)
    ):
        return
    batches.seen.clear()
    manifest |= {"samples": 0, "tokens": 0, "answer_tokens": 0, "sha256": []}
    for number in range(len(shards)):
        if number in broken:
            room = batches.recipe.data.samples - manifest["samples"]
            samples = batches.write(number, room, Counter())
            assert samples is not None  # there was such a batch
            data.write_shard(folder, number, samples)
        else:
            samples = shards[number]
            batches.remember(samples)
        manifest["sha256"].append(sha256_file(data.shard_path(folder, number)))
        _count(manifest, samples)
    if broken:
        data.write_manifest(folder, manifest)
    batches.keep(manifest)


def _count(manifest: dict[str, Any], samples: data.Samples) -> None:
    manifest["samples"] += len(samples)
    manifest["tokens"] += len(samples.tokens)
    manifest["answer_tokens"] += len(samples.tokens) - int(samples.answer_start.sum())


def _counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in dropped.items()) or "none"
