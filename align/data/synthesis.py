"""Generates training data with the target: batches of prompts and answers, resumable when
killed."""

import time
from collections import Counter
from contextlib import closing
from functools import cached_property
from pathlib import Path

from align.config.recipe import Recipe
from align.data.identity import check_same, identity
from align.data.sources import read_prompts
from align.writing.generation import Writer
from align.writing.outline import TargetInfo
from align.writing.prompts import TOO_LONG
from align.writing.rows import Plan, Row, Source
from align.writing.template import chat_template
from specalign.common.errors import UserError
from specalign.common.text import plural, say
from specalign.folder.chat import note_readings
from specalign.lm.model import Target
from specalign.rows import shards as data
from specalign.rows.shards import Manifest

FRUITLESS_BATCHES = 20  # in a row, all of whose samples were dropped, after which the writing stops
LINE_EVERY = 30.0  # seconds between lines of progress


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
        self.prompts = read_prompts(d) if d.prompts else None
        settings = identity(recipe, target, template, self.prompts)
        if exists:
            check_same(folder / "manifest.json", found, settings)
        if found.get("target_sha256") is None:
            found["target_sha256"] = settings["target_sha256"]
        counts = {"shards": 0, "samples": 0, "tokens": 0, "answer_tokens": 0}
        fresh = {**settings, **counts, "dropped": {}, "finished": False, "sha256": []}
        self.manifest: Manifest = {**fresh, **found}
        self.plan = Plan(recipe, target, template, self.prompts)
        self.seen = set[int]()
        if not quiet:
            note_readings(target, str(folder), template.date)
        if self.manifest["samples"] and not self.done:
            written = data.read_samples(folder, target.vocab_size)
            self.seen = {hash(tuple(written[i].tolist())) for i in range(len(written))}

    @cached_property
    def source(self) -> Source:
        """The source that writes the rows, opened on first use."""
        if self.recipe.data.server is not None:
            from align.writing.server import Served  # imports the client, which is slow

            return Served(self.plan, self.quiet)
        assert isinstance(self.plan.target, Target)
        return Writer(self.plan.target, self.plan)

    def close(self) -> None:
        if "source" in vars(self):
            self.source.close()

    @property
    def done(self) -> bool:
        return bool(self.manifest["samples"] >= self.recipe.data.samples)

    def write_shard(self) -> bool:
        """Write the next shard, without broken rows and samples that were there before; False if
        the prompts have ended. Raises UserError: settings under which nothing is kept."""
        manifest, folder, number = self.manifest, self.folder, self.manifest["shards"]
        rows = self.source.write(number)
        if rows is None:
            manifest["ended"] = True
            data.write_manifest(folder, manifest)
            return False
        dropped = Counter[str](manifest["dropped"])
        chosen = list[Row]()
        for row in rows:
            key = hash(tuple(row.tokens))
            if row.broken or key in self.seen:
                dropped[row.broken or "duplicate"] += 1
            elif len(chosen) < self.recipe.data.samples - manifest["samples"]:
                chosen.append(row)
                self.seen.add(key)
        samples = data.from_lists(
            [row.tokens for row in chosen],
            [row.answer_start for row in chosen],
            [row.answer_temperature for row in chosen],
        )
        manifest["sha256"].append(data.write_shard(folder, number, samples))
        manifest["shards"] += 1
        manifest["samples"] += len(samples)
        manifest["tokens"] += len(samples.tokens)
        manifest["answer_tokens"] += len(samples.tokens) - int(samples.answer_start.sum())
        manifest["dropped"] = dict(sorted(dropped.items()))
        manifest |= self.source.about
        manifest["finished"] = self.done
        data.write_manifest(folder, manifest)
        self.fruitless = 0 if len(samples) or self.prompts else self.fruitless + 1
        if self.fruitless == FRUITLESS_BATCHES:
            raise UserError(
                f"{folder}: no sample of {FRUITLESS_BATCHES} batches in a row was kept (dropped so "
                f"far: {_list_counts(dropped)}); change data.prompt_temperature, "
                "data.max_prompt_tokens or data.writer, or give prompts (data.prompts); delete "
                "the folder before retrying"
            )
        return True


def synthesize(recipe: Recipe, target: TargetInfo, folder: Path, quiet: bool = False) -> Manifest:
    """Write `recipe.data.samples` samples into `folder`, resuming from what is there; returns the
    manifest. Raises UserError: a folder written with other settings, prompts that can't be read,
    or settings under which nothing is kept."""
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
        start = printed = time.monotonic()
        while not writing.done and writing.write_shard():
            if not quiet and time.monotonic() - printed >= LINE_EVERY:
                printed = time.monotonic()
                rate = (manifest["tokens"] - written) / (printed - start)
                say(f"{manifest['samples']}/{d.samples} samples, {rate:.0f} tokens/s kept")
    dropped = _list_counts(manifest["dropped"])
    if TOO_LONG in manifest["dropped"] and writing.prompts is not None:
        dropped += (
            f" (of {plural(len(writing.prompts), 'prompt')}; the limit is data.max_prompt_tokens="
            f"{d.prompt_limit}, data.long_prompts=cut shortens longer ones)"
        )
    if not manifest["samples"]:
        raise UserError(
            f"{folder}: data.prompts={d.prompts!r} produced no samples (dropped: {dropped})"
        )
    if not quiet:
        rate = (manifest["tokens"] - written) / max(time.monotonic() - start, 1e-9)
        say(
            f"{manifest['samples']} samples, {manifest['tokens']} tokens in {folder} "
            f"({rate:.0f} tokens/s kept; samples dropped: {dropped})"
        )
        if manifest["samples"] < d.samples:
            say(f"note: there were prompts for only {manifest['samples']} of {d.samples} samples")
    return manifest


def _list_counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none"
