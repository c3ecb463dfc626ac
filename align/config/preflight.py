"""All that a command lacks, in one error before anything heavy is imported: target, drafter to start from, data, packages, output
folder, device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from align.common.claims import check_folder
from align.common.commands import command
from align.common.errors import UserError, check_all
from align.common.files import check_ordinary
from align.common.hub import check_obtainable, is_hub_id, local_path, missing
from align.common.provenance import memory_bytes
from align.common.schema import read_object
from align.config.hardware import check_packages, check_processes, gpu_count
from align.config.recipe import Recipe
from align.config.recipe_files import shipped
from align.config.run_record import check_record
from align.importing.layouts import is_block
from align.target.names import WHEELS, check_name


def check_training(recipe: Recipe) -> None:
    """Raises UserError that names all that `align.train` lacks, OSError for a pipe or a device in the place of a file."""
    check_all(
        [
            *_model_checks(recipe),
            lambda: check_folder(Path(recipe.output), "output"),
            lambda: check_record(recipe),
            lambda: check_processes(recipe),
            lambda: check_memory(recipe),
            lambda: _check_stored(recipe),
            lambda: _check_data(recipe),
        ]
    )
    for name in ("metrics.csv", "samples.txt"):  # to which lines are added
        check_ordinary(Path(recipe.output, name))


def check_writing(recipe: Recipe) -> None:
    """Raises UserError that names all that `align.synthesize` lacks."""
    device = recipe.target.device if recipe.data.server is None else "cpu"
    check_all(
        [
            *_model_checks(recipe),
            partial(check_folder, recipe.data_folder, "data.path" if recipe.data.path else "output"),
            partial(_check_cuda, device),
            *_writing_checks(recipe),
        ]
    )


def _model_checks(recipe: Recipe) -> list[Callable[[], object]]:
    """Of the target, the drafter to start from, and packages."""
    return [
        lambda: _check_target(recipe.target.name),
        lambda: _check_init(recipe),
        lambda: check_packages(recipe),
    ]


def _writing_checks(recipe: Recipe) -> list[Callable[[], object]]:
    """Of what is read, and of disk and memory."""
    d = recipe.data
    checks: list[Callable[[], object]] = [lambda: _check_disk(recipe)]
    if d.prompts is not None:
        what = f"data.prompts={d.prompts!r}"
        checks.append(partial(check_obtainable, what, d.prompts, dataset=True))
    for source in d.text:
        checks.append(partial(check_obtainable, f"data.text={source!r}", source, dataset=True))
    if d.server is None:
        needed = d.batch_size * (d.prompt_limit + d.max_answer_tokens) * 256
        checks.append(lambda: _fits(needed, f"data.batch_size={d.batch_size}"))
    return checks


def _check_target(name: str) -> None:
    check_name(name)
    if name not in WHEELS and not name.startswith("wheel:"):
        check_obtainable(f"target {name!r}", name)


def _check_cuda(device: str) -> None:
    if device.startswith("cuda") and not gpu_count():
        raise UserError(f"device {device!r} was asked for, but torch sees no CUDA device")


def _check_stored(recipe: Recipe) -> None:
    stored = recipe.features_folder
    if recipe.target.parallel == "absent" and not (stored / "manifest.json").is_file():
        raise UserError(
            f"target.parallel=absent: {stored} holds nothing yet; {command('align.features')} with the words of this run, without "
            "target.parallel, stores what it reads"
        )


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
    if local_path(init).exists():
        _check_sizes(recipe)
        return
    if is_hub_id(init):
        check_obtainable(f"drafter.init={init!r}", init)
        return
    maker = Path(init).parent.name
    if maker in shipped():
        raise UserError(
            f"drafter.init={init!r}: no such folder; {command('align.train', f'recipe={maker}')} makes it"
        )
    raise missing(f"drafter.init={init!r}", init)


_SIZES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_target_layers": ("num_hidden_layers", "n_layer", "num_layers"),
}
"""Of a block drafter's config.json, and the names of the same sizes in the target's."""


def _check_sizes(recipe: Recipe) -> None:
    """Raises UserError where a block drafter's folder and a target's folder give different sizes; loading compares all of them."""
    drafter = local_path(recipe.drafter.init or "") / "config.json"
    target = _config_of_target(recipe.target.name)
    if not drafter.is_file() or target is None:
        return
    own, other = read_object(drafter), read_object(target)
    if own.get("model_type") != "block_drafter":
        return
    other = {**other, **(other.get("text_config") or {})}
    for size, names in _SIZES.items():
        theirs = next((other[name] for name in names if name in other), own.get(size))
        if own.get(size) != theirs:
            raise UserError(
                f"drafter.init={recipe.drafter.init!r} does not fit target {recipe.target.name!r}: {size} is {own.get(size)}, the "
                f"target has {theirs}; it was made for {own.get('target')!r}. Name a drafter of the model that your target was made "
                "from (drafter.init=FOLDER or a hub id), or train a new one (recipe=block)"
            )


def _config_of_target(name: str) -> Path | None:
    """config.json of a folder, or of a hub id that is cached."""
    path = local_path(name) / "config.json"
    if path.is_file():
        return path
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json") if is_hub_id(name) else None
    return Path(cached) if isinstance(cached, str) else None


def _check_data(recipe: Recipe) -> None:
    """Missing data are written when training starts, unless `data.write` forbids it."""
    folder = recipe.data_folder
    if (folder / "manifest.json").exists():  # whether they are all there is known when the target is
        return
    if recipe.data.write == "missing":
        place = [partial(check_folder, folder, "data.path")] if recipe.data.path else []
        check_all([*place, *_writing_checks(recipe), lambda: _check_empty(folder)])
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
