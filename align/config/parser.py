"""Reading a recipe: recipes/NAME.yaml and the files that it starts from, then the command line.

Wrong input ends in one line that names the key, the place and the nearest valid name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from align.config.arguments import COMMAND_LINE, as_text, read_arguments, read_value
from align.config.derived import Layer, Value, check_required, insert_kind, shorten_to_run
from align.config.drafter import DrafterConfig
from align.config.hardware import gpu_count
from align.config.help import help_text
from align.config.recipe import GROUPS, Recipe, keys, resolve
from align.config.recipe_files import find, flatten, read_with_bases, shipped, unique
from align.config.wandb_runs import read_agent_parameters, separate_trial
from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.common.hub import DEFAULT_TARGET
from specalign.common.schema import SHORT_DTYPES, convert
from specalign.common.strict_yaml import dump_yaml
from specalign.common.text import say, short

_MAPPINGS = ("objective.terms", "trainer.learning_rates", "data.template_kwargs")
"""Keys whose entries can be given one by one: `objective.terms.forward_kl=1`."""


def parse_command(argv: Sequence[str], prog: str, description: str) -> Recipe | None:
    """The recipe of a command line; None if the command ends here: after `--help` or `--print`.

    Raises:
        UserError: see `load_recipe`.
    """
    if {"-h", "--help", "--help-all"} & {*argv}:
        say(help_text(prog, description, every="--help-all" in argv))
        return None
    recipe = load_recipe([argument for argument in argv if argument != "--print"])
    if "--print" in argv:
        say(dump_yaml(resolve(recipe)), end="")
        return None
    return recipe


def load_recipe(argv: Sequence[str]) -> Recipe:
    """Read `recipe=NAME key=value …`. The command line overrides the file, which overrides its
    base.

    Raises:
        UserError: a key or value that is unknown, impossible, of the wrong type or given twice.
    """
    given = read_arguments(argv, shipped())
    given |= {key: as_text(value) for key, value in read_agent_parameters(given).items()}
    if "recipe" not in given:
        raise UserError(
            f"{COMMAND_LINE}: recipe=NAME is missing (for instance recipe=block; --help lists "
            "recipes, --help-all all keys)"
        )
    path = find(given.pop("recipe"), COMMAND_LINE)
    pairs = [
        pair
        for key, text in given.items()
        for pair in flatten(_parse(key, text), key, COMMAND_LINE)
    ]
    arguments = unique(pairs, COMMAND_LINE)
    layers = [(file.name, flat) for file, flat in read_with_bases(path)]
    layers = insert_kind([*layers, (COMMAND_LINE, arguments)], _load_shipped_drafter)
    values = _merge(layers)
    _separate_target(values, layers)
    recipe = _build(values, path.stem)
    separate_trial(recipe, arguments)
    return recipe


def _parse(key: str, text: str) -> Any:
    """An argument's value. For a list, an existing path is taken as it is: YAML might read
    something else."""
    kind = keys()[key].type if key in keys() else None
    if get_origin(kind) is list and str in get_args(kind) and _exists(text):
        return text
    return read_value(key, text)


def _load_shipped_drafter(name: str) -> DrafterConfig | None:
    if name not in shipped():
        return None
    return load_recipe([f"recipe={name}", f"target.name={DEFAULT_TARGET}"]).drafter


def _merge(layers: list[Layer]) -> dict[str, Value]:
    """The value of each key from the last layer that has it."""
    values: dict[str, Value] = {}
    for number, (where, flat) in enumerate(layers):
        for key in sorted(
            flat, key=lambda key: key not in _MAPPINGS
        ):  # a mapping before its entries
            if key in _MAPPINGS:
                values = {k: v for k, v in values.items() if not k.startswith(f"{key}.")}
            values.pop(key, None)
            values[key] = Value(flat[key], where, number)
    return values


def _separate_target(values: dict[str, Value], layers: list[Layer]) -> None:
    """A data.path from a recipe's file holds text of that file's target: add the target's name for
    any other."""
    files = [
        flat["target.name"]
        for where, flat in layers
        if where != COMMAND_LINE and "target.name" in flat
    ]
    usual = files[-1] if files else DEFAULT_TARGET
    folder = values.get("data.path")
    name = values["target.name"].value if "target.name" in values else usual
    if folder is None or folder.where == COMMAND_LINE or name == usual:
        return
    if isinstance(name, str) and isinstance(folder.value, str):
        suffix = re.sub(r"[^\w.-]+", "--", name.strip("/"))[-80:]
        values["data.path"] = folder._replace(value=f"{folder.value}-{suffix}")


def _build(values: dict[str, Value], name: str) -> Recipe:
    """Convert the values and create the sections, which validate themselves."""
    sections: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    sections[""]["name"] = name
    for key, (value, where, _) in values.items():
        if key == "launch.devices" and value == "auto":
            on_cpu = "launch.accelerator" in values and values["launch.accelerator"].value == "cpu"
            value = 1 if on_cpu else max(1, gpu_count())
        _set(sections, key, value, where)
    check_required(values, f"recipe={name}")
    shorten_to_run(sections, values)
    top = sections.pop("")
    top["output"] = str(expand_path(top.get("output") or f"runs/{top['name']}", "output"))
    for group, key in (("data", "path"), ("trainer", "features_path")):
        if folder := sections[group].get(key):
            sections[group][key] = str(expand_path(folder, f"{group}.{key}"))
    types = get_type_hints(Recipe)
    return Recipe(**top, **{group: types[group](**options) for group, options in sections.items()})


def _set(sections: dict[str, dict[str, Any]], name: str, value: Any, where: str) -> None:
    """Convert one value and put it into its section. Raises UserError."""
    if name == "base":
        raise UserError(
            f"{where}: base belongs in a recipe's file; choose a recipe with recipe=NAME"
        )
    mapping = next((m for m in _MAPPINGS if name.startswith(f"{m}.")), None)
    if name not in keys() and mapping is None:
        choices = [*keys(), *filter(None, GROUPS)]
        raise UserError(f"{where}: unknown key {short(name)}{nearest(name, choices)}")
    key = keys()[mapping or name]
    group, _, last = key.name.rpartition(".")
    if mapping is None:
        sections[group][last] = _convert(value, key.type, name, where)
        return
    entry = name.removeprefix(f"{mapping}.")
    converted = _convert(value, get_args(key.type)[1], name, where)
    sections[group][last] = {**sections[group].get(last, key.default), entry: converted}


def _convert(value: Any, kind: Any, name: str, where: str) -> Any:
    """`value` as `kind`; a text may stand for a list of texts, and a whole float (`6.0`, `1e3`) for
    an integer."""
    value = _with_integers(value, kind)
    alternatives = (kind, *get_args(kind))
    if isinstance(value, str) and any(
        get_origin(k) is list and str in get_args(k) for k in alternatives
    ):
        value = _split_list(value, are_paths=name in ("data.text", "data.exclude"))
    if get_origin(kind) is Literal and value not in get_args(kind) and isinstance(value, str):
        names: set[str] = next(({*pair} for pair in SHORT_DTYPES.items() if value in pair), set())
        value = next((other for other in names if other in get_args(kind)), value)
    return convert(value, kind, name, where)


def _with_integers(value: Any, kind: Any) -> Any:
    """Whole floats as integers where `kind` asks for integers: W&B draws floats for q_uniform."""
    if isinstance(value, float) and value.is_integer() and int in (kind, *get_args(kind)):
        return int(value)
    if isinstance(value, list):
        lists = [k for k in (kind, *get_args(kind)) if get_origin(k) is list]
        return [_with_integers(item, get_args(lists[0])[0]) for item in value] if lists else value
    return value


def _split_list(text: str, are_paths: bool) -> list[str]:
    """Split at commas and blanks, except what exists as a path.

    Paths are split at blanks only if a piece exists or each may be a hub id, so that errors name a
    misspelt path in full.
    """
    if _exists(text):
        return [text]
    entries: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        pieces = part.split()
        is_one_path = (
            are_paths and not any(map(_exists, pieces)) and not all("/" in p for p in pieces)
        )
        entries += [part] if is_one_path or _exists(part) else pieces
    return entries


def _exists(path: str) -> bool:
    try:
        return bool(path.strip()) and expand_path(path).exists()
    except (OSError, UserError):  # not a possible file name
        return False
