"""Everything that a command lacks, in one error, before torch is imported: target, drafter, data,
packages, folders, devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from align.config.drafter import DrafterConfig
from align.config.hardware import check_devices, check_packages
from align.config.option import require
from align.config.recipe import Recipe
from align.config.recipe_files import check_record, list_recipes
from specalign.common.claims import check_folder
from specalign.common.commands import command
from specalign.common.errors import UserError, check_all
from specalign.common.files import check_ordinary
from specalign.common.hub import check_obtainable, is_hub_id, local_path, missing
from specalign.common.schema import read_object
from specalign.formats.kinds import is_block
from specalign.lm.names import WHEELS, check_name

Check = Callable[[], object]


def check_training(recipe: Recipe, *more: Check) -> None:
    """Raises UserError that names everything that training lacks; OSError for a pipe or device in
    place of a file. `more`: checks to report together with these."""
    checks: list[Check] = [
        *_list_model_checks(recipe),
        partial(check_folder, Path(recipe.output), "output"),
        partial(check_record, recipe),
        partial(check_devices, recipe),
        partial(_check_data, recipe),
    ]
    check_all([*checks, *more])
    check_ordinary(Path(recipe.output, "metrics.csv"))  # which is appended to


def check_generation(recipe: Recipe, *more: Check) -> None:
    """The same for generating text."""
    checks: list[Check] = [
        *_list_model_checks(recipe),
        partial(check_folder, recipe.data_folder, "data.path" if recipe.data.path else "output"),
        *_list_source_checks(recipe),
    ]
    if recipe.data.server is None:
        checks.append(partial(check_devices, recipe))
    check_all([*checks, *more])


def _list_model_checks(recipe: Recipe) -> list[Check]:
    name = recipe.target.name
    checks: list[Check] = [partial(check_name, name)]
    if name not in WHEELS:
        checks.append(partial(check_obtainable, f"target {name!r}", name))
    return [*checks, partial(_check_init, recipe.drafter), partial(check_packages, recipe)]


def _list_source_checks(recipe: Recipe) -> list[Check]:
    """Of prompts and other text."""
    d = recipe.data
    sources = [] if d.prompts is None else [(f"data.prompts={d.prompts!r}", d.prompts)]
    sources += [(f"data.text={source!r}", source) for source in d.text]
    return [partial(check_obtainable, option, source, dataset=True) for option, source in sources]


def _check_init(drafter: DrafterConfig) -> None:
    """Whether drafter.init exists and is of drafter.kind; loading checks the rest."""
    init = drafter.init
    if init is None:
        return
    option = f"drafter.init={init!r}"
    config = local_path(init) / "config.json"
    if config.is_file() and is_block(read_object(config)) != (drafter.kind == "block"):
        found = "not a block drafter" if drafter.kind == "block" else "a block drafter"
        raise UserError(f"{option}: {found}, and drafter.kind={drafter.kind}")
    if is_hub_id(init) or local_path(init).exists():
        check_obtainable(option, init)
        return
    recipe = Path(init).parent.name
    if recipe in list_recipes():
        training = command("align.train", f"recipe={recipe}")
        raise UserError(f"{option}: no such folder; {training} creates it")
    raise missing(option, init)


def _check_data(recipe: Recipe) -> None:
    """Training generates missing data unless `data.write` forbids it. Whether existing data are
    complete is known later."""
    folder = recipe.data_folder
    if (folder / "manifest.json").exists():
        return
    if recipe.data.write == "never":
        generation = command("align.synthesize")
        raise UserError(
            f"{folder}: no data yet, and data.write=never; {generation} with the same arguments "
            "generates them (or name other data of this target: data.path=FOLDER)"
        )
    place = [partial(check_folder, folder, "data.path")] if recipe.data.path else []
    check_all([*place, *_list_source_checks(recipe)])


def check_file(path: Path, key: str) -> None:
    """Raises UserError if the file can't be written, OSError for a pipe or a device. Does not
    create it."""
    check_folder(path.parent, f"{key}={path}: folder")
    require(not path.is_dir(), f"{key}={path}: is a folder, not a file")
    check_ordinary(path)
