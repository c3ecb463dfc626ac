"""What training reads: the target's own words, written first where they are missing, and other text before them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.common.claims import claim_when_free, tidy
from align.common.commands import command
from align.common.errors import UserError
from align.common.text import say
from align.config.hardware import main_process
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.following import Followed, ShardsAsWritten
from align.data.identity import same_settings, written_otherwise
from align.data.index import read_samples
from align.data.packing import pack, split_validation
from align.data.shards import Texts
from align.data.stream import Shuffled, Stream, TextFirst
from align.data.synthesis import synthesize
from align.data.texts import is_read, open_text, read_text_manifest, read_texts, text_folder
from align.target.model import Target
from align.writing.agreement import PROBES, check_answers

TEXT_STREAM = 7
WAIT = 1.0
"""Seconds between looks at what another process writes."""


@dataclass
class Supply:
    """The texts of one run.

    training, validation: the target's own words on each side. text: other text, or None. later: the shards after those of
    `training`, in turn, where they are followed.
    """

    folder: Path
    training: Texts
    validation: Texts
    text: Texts | None = None
    later: ShardsAsWritten | None = None

    @property
    def manifest(self) -> dict[str, Any]:
        """Of the target's own words, as it is now."""
        return data.read_manifest(self.folder)

    @property
    def text_manifest(self) -> dict[str, Any] | None:
        """Of the other text."""
        return None if self.text is None else read_text_manifest(self.folder / "text")

    @property
    def exact(self) -> bool:
        """Whether the own words were drawn without top-p and top-k."""
        return bool(self.manifest.get("top_p", 1.0) == 1.0 and not self.manifest.get("top_k", 0))

    def stream(self, recipe: Recipe, text_rows: int | None = None) -> Stream:
        """The rows in the order of training. text_rows: how many of `data.text` come first; None = as the recipe says."""
        length, seed = recipe.data.length, recipe.seed
        own: Stream
        if self.later is None:
            own = Shuffled(pack(self.training, length, seed), seed)
        else:
            own = Followed(self.training, self.later, length, seed)
        if self.text is None:
            return own
        if text_rows is None:
            t = recipe.trainer
            text_rows = round(recipe.data.text_share * t.max_steps) * t.batch_size
        return TextFirst(Shuffled(pack(self.text, length, seed), seed, TEXT_STREAM), own, text_rows)

    def line(self, recipe: Recipe) -> str:
        """What is trained on, for people."""
        found, wanted = len(self.training) + len(self.validation), recipe.data.samples
        line = (
            f"training on {len(self.training)} samples ({self.training.token_count} tokens) of {self.folder}, "
            f"{len(self.validation)} held out"
        )
        if self.text is not None:
            share = recipe.data.text_share
            line += (
                f"; before them, for {share:.0%} of the steps, {self.text.token_count} tokens of other text"
            )
        if self.later is not None:
            line += "; the shards after them as they are written"
        elif 2 * found < wanted:
            line += f"\nwarning: the recipe asks for {wanted} samples, {self.folder} has {found}"
        elif found > wanted:
            line += f"\nnote: the recipe asks for {wanted} samples, {self.folder} has {found}, and all are read (fewer: another data.path)"
        return line


def open_supply(recipe: Recipe, target: Target, quiet: bool = False) -> Supply:
    """The data of a recipe. What is missing is written first, unless `data.write` forbids it.

    Raises:
        UserError: data that are missing, can't be read, or that another target wrote; rows that are too long for the target.
    """
    if target.anatomy.by_place and recipe.data.length > target.context_limit:
        raise UserError(
            f"data.length={recipe.data.length}: target {target.spec!r} counts places in a packed row, and its context is "
            f"{target.context_limit} tokens (data.length={target.context_limit})"
        )
    folder, d = recipe.data_folder, recipe.data
    text = _text(recipe, target, quiet) if d.text else None
    if d.follow:
        later = ShardsAsWritten(recipe, target, folder, quiet)
        samples = later.first(d.follow_after)
    else:
        later = None
        _write_missing(recipe, target, quiet)
        samples = read_samples(folder, target.vocab_size)
    manifest = data.read_manifest(folder)
    _check_writer(folder, manifest, samples, target)
    if not quiet and main_process() and (other := written_otherwise(manifest, recipe, target)):
        said = f"note: {folder} was written with {', '.join(other)}: its texts are taken as they are; for others give another data.path"
        say(said, error=True)
    return Supply(folder, *split_validation(samples, d.validation_fraction), text, later)


def _check_writer(folder: Path, manifest: dict[str, Any], samples: Texts, target: Target) -> None:
    """Raises UserError where another target wrote the samples. Where the weights were a server's alone, its greedy answers tell."""
    known = manifest.get("target_sha256")
    if known is None and manifest.get("writer") == "server":
        greedy = (samples.temperature == 0).nonzero()[:PROBES, 0].tolist()
        starts = [int(samples.answer_start[i]) for i in greedy]
        texts = [samples[i].tolist() for i in greedy]
        prompts = [text[:start] for text, start in zip(texts, starts, strict=True)]
        answers = [text[start:] for text, start in zip(texts, starts, strict=True)]
        check_answers(target, prompts, answers, f"{folder}: who wrote it")
        return
    if known != target.hash:
        other = " (another sha256)" if manifest.get("target") == target.spec else ""
        raise UserError(
            f"{folder}: written by {manifest.get('target')!r}{other}, not by {target.spec!r}; "
            "give another output, or another data.path"
        )


def _text(recipe: Recipe, target: Target, quiet: bool) -> Texts:
    folder = text_folder(recipe)
    if not is_read(recipe):
        _may_write(recipe, folder)
        if main_process():
            if not quiet:
                say(
                    f"{folder} lacks other text: data.text is read first (data.write=never refuses)",
                    error=True,
                )
            with claim_when_free(folder, "data.path", _report):
                if not is_read(recipe):  # another trial may have read it meanwhile
                    read_texts(recipe, target, quiet)
        while not is_read(recipe):
            time.sleep(WAIT)
    elif main_process():
        tidy(folder)
    return open_text(recipe, target)


def _may_write(recipe: Recipe, folder: Path) -> None:
    if recipe.data.write == "never":
        raise UserError(
            f"{folder}: data are missing, and data.write=never; {command('align.synthesize')} writes them"
        )


def _report(line: str) -> None:
    say(line, error=True)


def is_missing(recipe: Recipe, target: Target) -> bool:
    """Whether own words are to be written: none are there, or the writing of these was stopped. A folder of fewer samples
    that was written with other settings is taken as it is, unless nothing was kept of them."""
    folder = recipe.data_folder
    if not (folder / "manifest.json").exists():
        return True
    manifest = data.read_manifest(folder)
    if not manifest["samples"]:
        return True
    if manifest["samples"] >= recipe.data.samples or manifest.get("ended"):
        return False
    return same_settings(manifest, recipe, target)


def _missing(recipe: Recipe, target: Target) -> str:
    """What is not there, what is written where, how much it is, and how to refuse."""
    d, folder = recipe.data, recipe.data_folder
    there = data.read_manifest(folder)["samples"] if (folder / "manifest.json").exists() else 0
    lacks = f"has {there} of {d.samples} samples" if there else "holds no data"
    new = d.samples - there
    longest = min(d.prompt_limit + d.max_answer_tokens, target.context_limit)
    rows = -(-new // d.batch_size) * d.batch_size  # whole batches are written, whatever is kept of the last
    return (
        f"{folder} {lacks}: the target writes {new} first, {d.batch_size} at a time, at most "
        f"{rows * longest:,} tokens, and more for what it drops "
        "(data.write=never refuses); a line says how long after the first batch"
    )


def _write_missing(recipe: Recipe, target: Target, quiet: bool) -> None:
    d, folder = recipe.data, recipe.data_folder
    if not is_missing(recipe, target):
        if main_process():
            tidy(folder)
        return
    _may_write(recipe, folder)
    if main_process():
        if not quiet:
            say(_missing(recipe, target), error=True)
        with claim_when_free(folder, "data.path" if d.path else "output", _report):
            if is_missing(recipe, target):  # another trial may have written it meanwhile
                synthesize(recipe, target, folder, quiet)
    while is_missing(recipe, target):  # another process of this run writes
        time.sleep(WAIT)
