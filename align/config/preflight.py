"""What a command lacks, before torch is imported: target, drafter, data, packages, folders,
devices."""

from pathlib import Path

from align.config.drafter import DrafterConfig
from align.config.hardware import check_devices, check_packages
from align.config.option import require
from align.config.recipe import Recipe
from align.config.recipe_files import check_record
from specalign.common.claims import check_folder
from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.common.files import check_ordinary
from specalign.common.hub import check_obtainable, is_hub_id, local_path, missing
from specalign.common.schema import read_object
from specalign.formats.kinds import is_block
from specalign.lm.names import WHEELS, check_name


def check_training(recipe: Recipe) -> None:
    """Raises UserError for the first thing that training lacks; OSError for a pipe or device in
    place of a file."""
    _check_models(recipe)
    check_folder(Path(recipe.output), "output")
    check_record(recipe)
    check_devices(recipe)
    if not (recipe.data_folder / "manifest.json").exists():
        _check_data(recipe)
        generation = command("align.synthesize")
        lacking = (
            f"{recipe.data_folder}: no data yet, and data.write=never; {generation} with the same "
            "arguments generates them (or name other data of this target: data.path=FOLDER)"
        )
        require(recipe.data.write != "never", lacking)
    check_ordinary(Path(recipe.output, "metrics.csv"))  # which is appended to


def check_generation(recipe: Recipe) -> None:
    """The same for generating text."""
    _check_models(recipe)
    _check_data(recipe)
    if recipe.data.server is None:
        check_devices(recipe)


def _check_models(recipe: Recipe) -> None:
    name, init = recipe.target.name, recipe.drafter.init
    check_name(name)
    check_packages(recipe)
    if name not in WHEELS:
        check_obtainable(f"target {name!r}", name)
    if init is not None:
        _check_init(recipe.drafter, init)


def _check_data(recipe: Recipe) -> None:
    """The folder and the sources of data to generate."""
    d = recipe.data
    check_folder(recipe.data_folder, "data.path" if d.path else "output")
    if d.prompts is not None:
        check_obtainable(f"data.prompts={d.prompts!r}", d.prompts, dataset=True)
    for source in d.text:
        check_obtainable(f"data.text={source!r}", source, dataset=True)


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
