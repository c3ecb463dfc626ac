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
from align.config.recipe_files import check_record
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
        partial(check_folder, Path(recipe.output), "output"),
        partial(check_record, recipe),
        partial(check_devices, recipe),
    ]
    if not (recipe.data_folder / "manifest.json").exists():
        checks += _list_data_checks(recipe)
        generation = command("align.synthesize")
        lacking = (
            f"{recipe.data_folder}: no data yet, and data.write=never; {generation} with the same "
            "arguments generates them (or name other data of this target: data.path=FOLDER)"
        )
        checks.append(partial(require, recipe.data.write != "never", lacking))
    check_all([*_list_model_checks(recipe), *checks, *more])
    check_ordinary(Path(recipe.output, "metrics.csv"))  # which is appended to


def check_generation(recipe: Recipe, *more: Check) -> None:
    """The same for generating text."""
    checks = [*_list_model_checks(recipe), *_list_data_checks(recipe)]
    if recipe.data.server is None:
        checks.append(partial(check_devices, recipe))
    check_all([*checks, *more])


def _list_model_checks(recipe: Recipe) -> list[Check]:
    name, init = recipe.target.name, recipe.drafter.init
    checks: list[Check] = [partial(check_name, name), partial(check_packages, recipe)]
    if name not in WHEELS:
        checks.append(partial(check_obtainable, f"target {name!r}", name))
    if init is not None:
        checks.append(partial(_check_init, recipe.drafter, init))
    return checks


def _list_data_checks(recipe: Recipe) -> list[Check]:
    """Of the folder and of the sources of data to generate."""
    d = recipe.data
    sources = [] if d.prompts is None else [(f"data.prompts={d.prompts!r}", d.prompts)]
    sources += [(f"data.text={source!r}", source) for source in d.text]
    return [
        partial(check_folder, recipe.data_folder, "data.path" if d.path else "output"),
        *(partial(check_obtainable, key, source, dataset=True) for key, source in sources),
    ]


def _check_init(drafter: DrafterConfig, init: str) -> None:
    """Whether drafter.init exists and is of drafter.kind; loading checks the rest."""
    given = f"drafter.init={init!r}"
    if not is_hub_id(init) and not local_path(init).exists():
        raise missing(given, init)
    check_obtainable(given, init)
    config = local_path(init) / "config.json"
    if config.is_file() and is_block(read_object(config)) != (drafter.kind == "block"):
        found = "not a block drafter" if drafter.kind == "block" else "a block drafter"
        raise UserError(f"{given}: {found}, and drafter.kind={drafter.kind}")
