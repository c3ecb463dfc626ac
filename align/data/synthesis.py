"""The target writes its own training data: batches of prompts and answers, resumable after a kill."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from align.common.errors import UserError
from align.common.files import expanded, sha256_file
from align.common.text import say, short
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.batches import Batches, MakeSource
from align.data.index import ShardFolder
from align.data.prompts import read_prompts
from align.target.model import Target
from align.writing.in_process import InProcess
from align.writing.journal import forget_until
from align.writing.progress import WritingProgress
from align.writing.rows import Plan, Progress, Source, Template, Told, chat_template, unheard

_OLDER: dict[str, Any] = {"prompt_openings": [], "template_kwargs": {}, "system": None, "writer": "target"}
"""What a manifest means that was written before the key came."""


def identity(recipe: Recipe, target: Told, template: Template, prompts: list[str] | None) -> dict[str, Any]:
    """What a restart must find unchanged, or the shards would not belong together.

    A server's address is none of it, and its type of numbers is not known; a target whose weights are not here has no hash.
    """
    d, served = recipe.data, recipe.data.server is not None
    return {
        "writer": "server" if served else "target",
        "target": target.spec,
        "target_sha256": target.hash,
        "template_sha256": template.sha256,
        "template_kwargs": dict(d.template_kwargs),
        "system": d.system,
        "dtype": None if served else getattr(target, "dtype_name", None),
        "seed": recipe.seed,
        "prompts": d.prompts,
        "prompts_sha256": None
        if prompts is None
        else hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "prompt_temperature": d.prompt_temperature,
        "prompt_openings": list(d.prompt_openings),
        "answer_temperatures": list(d.answer_temperatures),
        "top_p": d.top_p,
        "top_k": d.top_k,
        "max_prompt_tokens": d.max_prompt_tokens,
        "max_answer_tokens": d.max_answer_tokens,
        "batch_size": d.batch_size,
        "near_duplicate_threshold": d.near_duplicate_threshold,
    }


def same_settings(manifest: dict[str, Any], recipe: Recipe, target: Target) -> bool:
    """Whether `synthesize` would go on from there; the prompts themselves are not looked at."""
    wanted = identity(recipe, target, chat_template(target), None)
    return all(
        _same(manifest, key, value)
        for key, value in wanted.items()
        if key not in ("prompts_sha256", "target")
    )


_WORDING = (
    "prompt_temperature", "prompt_openings", "answer_temperatures", "top_p", "top_k", "max_prompt_tokens", "max_answer_tokens", "system",
    "template_kwargs",
)  # fmt: skip
"""Settings that make other texts, beside prompts, seed and target."""


def written_otherwise(manifest: dict[str, Any], recipe: Recipe, target: Target) -> list[str]:
    """How the texts that are there were written where the recipe says otherwise, `data.key=value` each. Prompts in a file are read and
    compared; a data set is not asked."""
    d, prompts = recipe.data, None
    if d.prompts is not None and expanded(d.prompts).is_file():
        with suppress(UserError):  # it was needed for the writing alone
            prompts = read_prompts(d.prompts, d.prompts_split, d.prompts_column)
    wanted = identity(recipe, target, chat_template(target), prompts)
    keys = _WORDING if prompts else (*_WORDING, "prompts")
    other = [key for key in keys if not _same(manifest, key, wanted[key])]
    said = [f"data.{key}={short(manifest.get(key, _OLDER.get(key)), 60)}" for key in other]
    if prompts and not _same(manifest, "prompts_sha256", wanted["prompts_sha256"]):
        said.append(f"other prompts than {d.prompts} holds")
    return said


def _same(manifest: dict[str, Any], key: str, value: Any) -> bool:
    found = manifest.get(key, _OLDER.get(key))
    if key == "target_sha256" and None in (found, value):  # written where the weights were not
        return True
    return bool(found == value)


def _resume(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The manifest to go on from: the folder's own, when it was written with the same settings; a fresh one where there is none, or
    where none of what other settings wrote was kept."""
    nothing = {"shards": 0, "samples": 0, "tokens": 0, "answer_tokens": 0, "dropped": {}, "finished": False}
    nothing |= {"sha256": []}
    if not (folder / "manifest.json").exists():
        return wanted | nothing
    manifest = data.read_manifest(folder)
    for key, value in wanted.items():
        if not _same(manifest, key, value):
            if manifest["shards"] and not manifest["samples"]:
                forget_until(folder, manifest["shards"])
                return wanted | nothing
            raise UserError(
                f"{folder}/manifest.json: {key} is {manifest.get(key)!r}, this recipe says {value!r}; "
                "give the data.… keys that it was written with, or another data.path"
            )
    if manifest.get("target_sha256") is None:
        manifest["target_sha256"] = wanted["target_sha256"]
    return manifest | {key: value for key, value in nothing.items() if key not in manifest}


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
        target: Told,
        folder: Path,
        quiet: bool = False,
        source: MakeSource | None = None,
    ) -> None:
        d = recipe.data
        self.recipe, self.folder, self.quiet, self.fruitless = recipe, folder, quiet, 0
        template = chat_template(target)
        self.prompts = None
        if d.prompts:
            self.prompts = read_prompts(
                d.prompts, d.prompts_split, d.prompts_column, d.prompts_config, d.prompts_revision
            )
        self.manifest = _resume(folder, identity(recipe, target, template, self.prompts))
        plan = Plan(recipe, target, template, self.prompts)
        self.batches = Batches(plan, folder, source or partial(self._source, target))
        if recipe.data.server is not None and not (folder / "manifest.json").exists():
            _ = self.batches.source  # it has to be there before anything is written
            data.write_manifest(folder, self.manifest)  # the settings of the first answers that are kept
        _mend(folder, self.manifest, self.batches, quiet)
        forget_until(folder, self.manifest["shards"] - 1)  # killed between a shard and this

    def _source(self, target: Told, plan: Plan) -> Source:
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

    def write_shard(self, progress: Progress = unheard) -> bool:
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
    recipe: Recipe, target: Told, folder: Path, quiet: bool = False, source: MakeSource | None = None
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
    longest = d.max_prompt_tokens * (d.prompts is None) + d.max_answer_tokens
    with WritingProgress(d.samples, manifest["samples"], quiet, longest) as progress:
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
