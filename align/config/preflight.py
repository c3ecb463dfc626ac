"""What a command lacks, said before anything heavy is imported: target, drafter to begin with, data, output folder,
device."""

from __future__ import annotations

import shutil
from pathlib import Path

from align.common.claims import check_folder
from align.common.commands import command
from align.common.errors import UserError
from align.common.files import check_ordinary
from align.common.hub import is_hub_id, local_path, missing
from align.common.provenance import memory_bytes
from align.common.schema import read_object
from align.config.hardware import check_processes, gpu_count
from align.config.parser import shipped
from align.config.recipe import Recipe
from align.config.run_record import check_record
from align.importing.layouts import is_block
from align.target.names import check_name


def check_training(recipe: Recipe) -> None:
    """Raises UserError for what `align.train` will lack, OSError for a pipe or a device in the place of a file."""
    check_name(recipe.target.name)
    _check_init(recipe)
    check_folder(Path(recipe.output), "output")
    for name in ("metrics.csv", "samples.txt"):  # to which lines are added
        check_ordinary(Path(recipe.output, name))
    check_record(recipe)
    check_processes(recipe)
    check_memory(recipe)
    stored = recipe.features_folder
    if recipe.target.parallel == "absent" and not (stored / "manifest.json").is_file():
        raise UserError(
            f"target.parallel=absent: {stored} holds nothing yet; {command('align.features')} with the words of this run, without "
            "target.parallel, stores what it reads"
        )
    _check_data(recipe)


def check_writing(recipe: Recipe) -> None:
    """Raises UserError for what `align.synthesize` will lack."""
    check_name(recipe.target.name)
    _check_init(recipe)
    check_folder(recipe.data_folder, "data.path" if recipe.data.path else "output")
    _check_disk(recipe)
    if recipe.data.server is not None:
        return
    if recipe.target.device.startswith("cuda") and not gpu_count():
        raise UserError(f"device {recipe.target.device!r} was asked for, but torch sees no CUDA device")
    d = recipe.data
    _fits(d.batch_size * (d.max_prompt_tokens + d.max_answer_tokens) * 256, f"data.batch_size={d.batch_size}")


def check_memory(recipe: Recipe, hidden_size: int = 8) -> None:
    """Raises UserError for a step that has no room in memory: a few vectors of the target's width a token are the least of it."""
    t = recipe.trainer
    rows = t.batch_size // (t.accumulate * recipe.processes)
    _fits(rows * recipe.data.length * hidden_size * 12, f"trainer.batch_size={t.batch_size}")
    d = recipe.drafter
    if d.kind == "ddit":  # weights, gradients and AdamW's two averages
        weights = d.layers * (12 * d.hidden_size**2 + 6 * d.hidden_size * d.cond_dim)
        _fits(16 * weights, f"drafter.hidden_size={d.hidden_size} with drafter.layers={d.layers}")


def _fits(needed: int, key: str) -> None:
    memory = memory_bytes()
    if memory is not None and needed > memory:
        raise UserError(
            f"{key} needs {needed / 2**30:,.0f} GiB at least, this machine has {memory / 2**30:,.0f}"
        )


def _check_disk(recipe: Recipe) -> None:
    """Two bytes a token are the least, and a sample holds one of a prompt and one of an answer."""
    d, folder = recipe.data, recipe.data_folder.absolute()
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.is_dir())).free
    for key, needed in (
        (f"data.samples={d.samples}", 4 * d.samples),
        (f"data.text_tokens={d.text_tokens}", 2 * d.text_tokens if d.text else 0),
    ):
        if 0 < free < needed:  # 0: a file system that holds no files, which is said where one is made
            raise UserError(
                f"{key} needs {needed / 2**30:,.0f} GiB of disk at least, {folder} has {free / 2**30:,.0f} free"
            )


def _check_init(recipe: Recipe) -> None:
    init = recipe.drafter.init
    if init is None:
        return
    config = local_path(init) / "config.json"
    if config.is_file():
        block, kind = is_block(read_object(config)), recipe.drafter.kind
        if block != (kind == "block"):
            other = "a block drafter" if block else "no block drafter"
            raise UserError(f"drafter.init={init!r}: that is {other}, and drafter.kind={kind}")
    if local_path(init).exists() or is_hub_id(init):
        return
    maker = Path(init).parent.name
    if maker in shipped():
        raise UserError(
            f"drafter.init={init!r}: no such folder; {command('align.train', f'recipe={maker}')} makes it"
        )
    raise missing(f"drafter.init={init!r}", init)


def _check_data(recipe: Recipe) -> None:
    """Missing data are written when training starts, unless `data.write` forbids it."""
    folder = recipe.data_folder
    if (folder / "manifest.json").exists():  # whether they are all there is known when the target is
        return
    if recipe.data.write == "missing":
        check_writing(recipe)
        _check_empty(folder)
        return
    raise UserError(
        f"{folder}: no data yet, and data.write=never; {command('align.synthesize')} with the same words writes them "
        "(or name others that this target wrote: data.path=FOLDER)"
    )


def _check_empty(folder: Path) -> None:
    """Whether data may be begun there: not beside other things, a drafter's for example, where a wrong path leads."""
    own = (
        "shard-*",
        "text",
        ".*",
        "near-duplicates.sqlite*",
    )  # a writing that was stopped before its manifest
    others = sorted(p.name for p in folder.glob("*") if not any(p.match(name) for name in own))
    if others:
        raise UserError(
            f"data.path={folder}: no data there, but {others[0]!r}; name a folder of data, or a new one"
        )


def check_file(path: Path, key: str) -> None:
    """Raises UserError where the file can't be written, OSError for a pipe or a device. It is not made yet."""
    check_folder(path.parent, f"{key}={path}: folder")
    if path.is_dir():
        raise UserError(f"{key}={path}: is a folder, not a file")
    check_ordinary(path)
