"""The training data of a run: generated text (generated first if missing) and other text."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from align.config.hardware import main_process
from align.config.recipe import Recipe
from align.data.identity import find_differences
from align.data.packing import RowStream, pack, split_validation
from align.data.synthesis import synthesize
from align.data.texts import TextFields, is_read, open_text, read_texts, text_folder
from align.writing.agreement import PROBES, check_answers
from specalign.common.claims import claim_when_free
from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.common.text import say, short
from specalign.lm.model import Target
from specalign.rows import shards as data
from specalign.rows.shards import Manifest, ShardSamples, read_samples

WAIT_SECONDS = 1.0  # between looks at what another process writes
_SAME_TEXTS = ("writer", "target_sha256", "dtype", "seed", "batch_size")
"""Settings that do not make a note."""


@dataclass
class Supply:
    """The data of one run. training, validation: generated samples of each split. text: other
    text."""

    folder: Path
    manifest: Manifest
    training: ShardSamples
    validation: ShardSamples
    text: ShardSamples | None = None
    text_manifest: Manifest | None = None

    @property
    def exact(self) -> bool:
        """Whether the target's texts were drawn without top-p and top-k."""
        return self.manifest.get("top_p", 1.0) == 1.0 and not self.manifest.get("top_k", 0)

    def stream(self, recipe: Recipe, text_rows: int) -> RowStream:
        """The rows in the order of training, `text_rows` of other text first."""
        length, seed = recipe.data.length, recipe.seed
        own = pack(self.training, length, seed)
        if self.text is None:
            return RowStream(own, seed)
        return RowStream(own, seed, pack(self.text, length, seed), text_rows)

    def line(self, recipe: Recipe) -> str:
        found, wanted = len(self.training) + len(self.validation), recipe.data.samples
        line = (
            f"training on {len(self.training)} samples ({self.training.token_count} tokens) "
            f"from {self.folder}, {len(self.validation)} held out"
        )
        longer = int((self.training.lengths > recipe.data.length).sum())
        if longer:
            line += f"; {longer} samples are truncated to data.length={recipe.data.length}"
        if self.text is not None:
            share, tokens = recipe.data.text_share, self.text.token_count
            line += f", after {tokens} tokens of other text in the first {share:.0%} of the steps"
        if found > wanted or 2 * found < wanted:
            level = "note" if found > wanted else "warning"
            line += f"\n{level}: the recipe asks for {wanted} samples, {self.folder} has {found}"
        return line


def open_supply(recipe: Recipe, target: Target, quiet: bool = False) -> Supply:
    """The data of a recipe. What is missing is generated first, unless `data.write` forbids it.
    Raises UserError: data that are missing, can't be read, or were written by another target; rows
    longer than the target's context."""
    d, folder = recipe.data, recipe.data_folder
    if target.anatomy.by_place and d.length > target.context_limit:
        raise UserError(
            f"data.length={d.length}: target {target.spec!r} numbers positions across a packed row "
            f"and its context is {target.context_limit} tokens; use "
            f"data.length={target.context_limit}"
        )
    text = text_manifest = None
    if d.text:
        write = partial(read_texts, recipe, target, quiet)
        note = "reading data.text"
        _write_if(lambda: not is_read(recipe), write, recipe, text_folder(recipe), note, quiet)
        text = open_text(recipe, target)
        text_manifest = data.read_manifest(text_folder(recipe), TextFields)
    write = partial(synthesize, recipe, target, folder, quiet)
    note = f"generating {d.samples} samples, {d.batch_size} at a time"
    _write_if(partial(is_missing, recipe, target), write, recipe, folder, note, quiet)
    samples = read_samples(folder, target.vocab_size)
    manifest = data.read_manifest(folder)
    _check_writer(folder, manifest, samples, target)
    different = [
        f"data.{key}={short(manifest.get(key), 60)}"
        for key in find_differences(manifest, recipe, target)
        if key not in _SAME_TEXTS
    ]
    if different and not quiet and main_process():
        say(
            f"note: {folder} was generated with {', '.join(different)}; its texts are used "
            "unchanged (choose another data.path to generate others)",
            error=True,
        )
    training, validation = split_validation(samples, d.validation_fraction)
    return Supply(folder, manifest, training, validation, text, text_manifest)


def _check_writer(folder: Path, manifest: Manifest, samples: ShardSamples, target: Target) -> None:
    """Raises UserError if another target wrote the samples. If only a server had the weights, its
    greedy answers are compared."""
    known = manifest.get("target_sha256")
    if known is None and manifest.get("writer") == "server":
        chosen = (samples.temperature == 0).nonzero()[: len(PROBES), 0].tolist()
        parts = [(samples[i].tolist(), int(samples.answer_start[i])) for i in chosen]
        prompts = [text[:start] for text, start in parts]
        answers = [text[start:] for text, start in parts]
        check_answers(target, prompts, answers, f"{folder}: the model that wrote it")
    elif known != target.hash:
        other = " (another sha256)" if manifest.get("target") == target.spec else ""
        raise UserError(
            f"{folder}: written by {manifest.get('target')!r}{other}, not by {target.spec!r}; "
            "choose another output, or another data.path"
        )


def _write_if(
    missing: Callable[[], bool],
    write: Callable[[], object],
    recipe: Recipe,
    folder: Path,
    note: str,
    quiet: bool,
) -> None:
    """Write what is missing in the main process while the others wait."""
    if not missing():
        return
    if recipe.data.write == "never":
        raise UserError(
            f"{folder}: data is missing and data.write=never; generate it with "
            f"{command('align.synthesize')}"
        )
    if main_process():
        if not quiet:
            say(f"{folder} lacks data: {note} first (data.write=never fails instead)", error=True)
        key = "data.path" if recipe.data.path else "output"
        with claim_when_free(folder, key, partial(say, error=True)):
            if missing():  # another trial may have written it meanwhile
                write()
    while missing():
        time.sleep(WAIT_SECONDS)


def is_missing(recipe: Recipe, target: Target) -> bool:
    """Whether texts are to be written: none exist, or their writing was stopped. A folder with
    fewer samples that was written with other settings is used as it is."""
    folder = recipe.data_folder
    if not (folder / "manifest.json").exists():
        return True
    manifest = data.read_manifest(folder)
    if manifest["samples"] >= recipe.data.samples or manifest.get("ended") and manifest["samples"]:
        return False
    return not manifest["samples"] or not find_differences(manifest, recipe, target)
