"""Generates training data with the target: batches of prompts and answers, resumable when
killed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path

from align.config.recipe import Recipe
from align.data import shards as data
from align.data.identity import identity, is_same
from align.data.prompts import read_prompts
from align.data.shards import Manifest, Samples
from align.writing.generation import Writer
from align.writing.journal import forget_until
from align.writing.outline import TargetInfo
from align.writing.prompts import TOO_LONG
from align.writing.rows import Plan, Progress, Row, Source, ignore_progress
from align.writing.template import chat_template
from specalign.common.errors import UserError
from specalign.common.text import plural, say
from specalign.folder.template_notes import note_readings
from specalign.lm.model import Target

FRUITLESS_BATCHES = 20
"""In a row, all of whose samples were dropped, after which the writing stops."""
LINE_EVERY = 30.0
"""Seconds between lines of progress."""


class Synthesis:
    """Writes one data folder, a shard at a time. Raises UserError: a folder written with other
    settings, prompts that can't be read, a server that can't be used."""

    def __init__(
        self, recipe: Recipe, target: TargetInfo, folder: Path, quiet: bool = False
    ) -> None:
        d = recipe.data
        self.recipe, self.folder, self.quiet, self.fruitless = recipe, folder, quiet, 0
        exists = (folder / "manifest.json").exists()
        found = data.read_manifest(folder) if exists else {}
        template = chat_template(target, found.get("date"))
        self.prompts = None
        if d.prompts:
            self.prompts = read_prompts(
                d.prompts, d.prompts_split, d.prompts_column, d.prompts_config, d.prompts_revision
            )
        settings = identity(recipe, target, template, self.prompts)
        if exists:
            _check_settings(folder, found, settings)
        if found.get("target_sha256") is None:
            found["target_sha256"] = settings["target_sha256"]
        counts = {"shards": 0, "samples": 0, "tokens": 0, "answer_tokens": 0}
        fresh = {**settings, **counts, "dropped": {}, "finished": False, "sha256": []}
        self.manifest: Manifest = {**fresh, **found}
        self.plan = Plan(recipe, target, template, self.prompts)
        self.seen = set[int]()
        if not quiet:
            note_readings(target, str(folder), template.date)
        if d.server is not None and not exists:
            _ = self.source  # it has to be reachable before anything is written
            data.write_manifest(folder, self.manifest)  # settings of the first stored answers
        self._restore()
        forget_until(folder, self.manifest["shards"] - 1)  # a kill may have come before this

    @cached_property
    def source(self) -> Source:
        """The source that writes the rows, opened on first use."""
        if self.recipe.data.server is not None:
            from align.writing.served import Served  # imports the client, which is slow

            return Served(self.plan, self.folder, self.quiet)
        assert isinstance(self.plan.target, Target)
        return Writer(self.plan.target, self.plan)

    def close(self) -> None:
        """End running requests."""
        if "source" in vars(self):
            self.source.close()

    @property
    def done(self) -> bool:
        """Whether all samples are written."""
        return bool(self.manifest["samples"] >= self.recipe.data.samples)

    def write_shard(self, progress: Progress = ignore_progress) -> bool:
        """Write the next shard; False if the prompts have ended. Raises UserError: settings under
        which nothing is kept."""
        manifest, folder = self.manifest, self.folder
        dropped = Counter[str](manifest["dropped"])
        samples = self._write_batch(manifest["shards"], manifest, dropped, progress)
        if samples is None:
            manifest["ended"] = True
            data.write_manifest(folder, manifest)
            return False
        manifest["shards"] += 1
        manifest["dropped"] = dict(sorted(dropped.items()))
        manifest |= self.source.about
        manifest["finished"] = self.done
        data.write_manifest(folder, manifest)
        forget_until(folder, manifest["shards"] - 1)
        self.fruitless = 0 if len(samples) or self.prompts else self.fruitless + 1
        if self.fruitless == FRUITLESS_BATCHES:
            raise UserError(
                f"{folder}: no sample of {FRUITLESS_BATCHES} batches in a row was kept (dropped so "
                f"far: {_list_counts(dropped)}); change data.prompt_temperature, "
                "data.max_prompt_tokens or data.writer, or give prompts (data.prompts); delete "
                "the folder before retrying"
            )
        return True

    def _write_batch(
        self,
        number: int,
        manifest: Manifest,
        dropped: Counter[str],
        progress: Progress = ignore_progress,
    ) -> Samples | None:
        """Write a batch as a shard, without broken rows and samples that were there before, and
        count it in the manifest; None after the last prompt. `dropped` counts why rows are left
        out."""
        room = self.recipe.data.samples - manifest["samples"]
        rows = self.source.write(number, room, progress)
        if rows is None:
            return None
        chosen = list[Row]()
        for row in rows:
            if row.broken:
                dropped[row.broken] += 1
            elif self._is_duplicate(row.tokens):
                dropped["duplicate"] += 1
            elif len(chosen) < room:
                chosen.append(row)
        samples = data.from_lists(
            [row.tokens for row in chosen],
            [row.answer_start for row in chosen],
            [row.answer_temperature for row in chosen],
        )
        _count(manifest, samples, data.write_shard(self.folder, number, samples))
        return samples

    def _is_duplicate(self, tokens: list[int]) -> bool:
        """Whether a sample with these tokens was there before."""
        key = hash(tuple(tokens))
        is_known = key in self.seen
        self.seen.add(key)
        return is_known

    def _restore(self) -> None:
        """Write missing and damaged shards again, and remember the samples of the others."""
        manifest = self.manifest
        found = [self._read_shard(number) for number in range(manifest["shards"])]
        if self.done and None not in found:
            return
        restored = {**manifest, "samples": 0, "tokens": 0, "answer_tokens": 0, "sha256": []}
        for number, samples in enumerate(found):
            if samples is None:
                self._write_batch(number, restored, Counter())
                continue
            for i in range(len(samples)):
                self._is_duplicate(samples[i].tolist())
            _count(restored, samples, manifest["sha256"][number])
        manifest |= restored
        if None in found:
            data.write_manifest(self.folder, manifest)

    def _read_shard(self, number: int) -> Samples | None:
        """A shard; None if it is missing or damaged."""
        path, sha256 = data.shard_path(self.folder, number), self.manifest["sha256"][number]
        try:
            return data.read_shard(path, sha256, self.plan.target.vocab_size)
        except UserError as error:
            say(f"regenerating: {error}", error=True)
            return None


def _check_settings(folder: Path, found: Manifest, wanted: Mapping[str, object]) -> None:
    for key, value in wanted.items():
        if not is_same(found, key, value):
            raise UserError(
                f"{folder}/manifest.json: {key} is {found.get(key)!r}, this recipe says {value!r}; "
                "use the data.… keys that it was generated with, or another data.path"
            )


def synthesize(recipe: Recipe, target: TargetInfo, folder: Path, quiet: bool = False) -> Manifest:
    """Write `recipe.data.samples` samples into `folder`, resuming from what is there; returns the
    manifest. Missing or damaged shards are written again first: their content depends on the seed
    and their number alone. Raises UserError: a folder written with other settings, prompts that
    can't be read, or settings under which nothing is kept."""
    d = recipe.data
    with closing(Synthesis(recipe, target, folder, quiet)) as writing:
        manifest = writing.manifest
        if manifest["samples"] and not quiet:
            state = "is finished" if writing.done else f"is resumed up to {d.samples} samples"
            say(
                f"{folder} {state}: {manifest['samples']} samples, {manifest['tokens']} tokens "
                "so far"
            )
        if writing.done:
            return manifest
        written = manifest["tokens"]
        start = time.monotonic()
        progress = ignore_progress if quiet else _make_progress(writing)
        while not writing.done and writing.write_shard(progress):
            pass
    dropped = _list_counts(manifest["dropped"])
    if TOO_LONG in manifest["dropped"] and writing.prompts is not None:
        dropped += (
            f" (of {plural(len(writing.prompts), 'prompt')}; the limit is data.max_prompt_tokens="
            f"{d.prompt_limit}, data.long_prompts=cut shortens longer ones)"
        )
    if not manifest["samples"]:
        raise UserError(
            f"{folder}: data.prompts={d.prompts!r} produced no samples (texts left out: {dropped})"
        )
    if not quiet:
        rate = (manifest["tokens"] - written) / max(time.monotonic() - start, 1e-9)
        say(
            f"{manifest['samples']} samples, {manifest['tokens']} tokens in {folder} "
            f"({rate:.0f} kept tokens/s; texts left out: {dropped})"
        )
        if manifest["samples"] < d.samples:
            say(f"note: there were prompts for only {manifest['samples']} of {d.samples} samples")
    return manifest


def _make_progress(writing: Synthesis) -> Progress:
    """A callback that prints a line now and then."""
    wanted = writing.recipe.data.samples
    total = min(wanted, len(writing.prompts or range(wanted)))
    start = printed = time.monotonic()
    written = 0

    def count(tokens: int) -> None:
        nonlocal written, printed
        written += tokens
        now = time.monotonic()
        if now - printed >= LINE_EVERY:
            printed = now
            done = f"{writing.manifest['samples']}/{total} samples"
            say(f"{done}, {written:,} tokens at {written / (now - start):.0f} tokens/s")

    return count


def _count(manifest: Manifest, samples: Samples, sha256: str) -> None:
    manifest["sha256"].append(sha256)
    manifest["samples"] += len(samples)
    manifest["tokens"] += len(samples.tokens)
    manifest["answer_tokens"] += len(samples.tokens) - int(samples.answer_start.sum())


def _list_counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none"
