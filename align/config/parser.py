"""Reading a recipe: recipes/NAME.yaml and the files that it starts from, then the command line; and
the help of the commands that take one."""

import json
import textwrap
from collections.abc import Sequence
from typing import get_args, get_type_hints

from align.config.arguments import COMMAND_LINE, as_text, convert_value, read_arguments, read_value
from align.config.recipe import GROUPS, Recipe, keys, resolve
from align.config.recipe_files import (
    FOLDER,
    Layer,
    find,
    flatten_all,
    insert_kinds,
    list_recipes,
    read_with_bases,
)
from align.config.wandb_runs import read_agent_parameters, separate_trial
from specalign.common.commands import command
from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.common.schema import JsonObject, type_name
from specalign.common.strict_yaml import dump_yaml
from specalign.common.text import say, short

_MAPPINGS = ("objective.terms", "data.template_kwargs")
"""Keys whose entries can be given one by one: `objective.terms.forward_kl=1`."""
_REQUIRED = "???"  # in a recipe's file: the user must give this value
_LENGTHS = (
    ("trainer.max_steps", "trainer.warmup_steps", 3),
    ("data.samples", "data.batch_size", 1),
)
"""A run's length, a key that it limits, and the largest share of it: 1 / number."""
COMMON_KEYS = (
    "output", "target.name", "data.samples", "data.prompts", "data.path", "drafter.init",
    "drafter.block_size", "trainer.max_steps", "trainer.max_minutes",
)  # fmt: skip
"""Keys of the short help."""


def parse_command(argv: Sequence[str], prog: str, description: str) -> Recipe | None:
    """The recipe of a command line; None if the command ends here: after `--help` or `--print`.
    Raises UserError: see `load_recipe`."""
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
    base. Raises UserError: a key or value that is unknown, impossible, of the wrong type or given
    twice."""
    given = read_arguments(argv, list_recipes())
    given |= {key: as_text(value) for key, value in read_agent_parameters(given).items()}
    if "recipe" not in given:
        raise UserError(
            f"{COMMAND_LINE}: recipe=NAME is missing (for instance recipe=block; --help lists "
            "recipes, --help-all all keys)"
        )
    path = find(given.pop("recipe"), COMMAND_LINE)
    values = {key: read_value(key, text) for key, text in given.items()}
    arguments = flatten_all(values, COMMAND_LINE)
    recipe = _build(insert_kinds([*read_with_bases(path), (COMMAND_LINE, arguments)]), path.stem)
    separate_trial(recipe, arguments)
    return recipe


def _build(layers: list[Layer], name: str) -> Recipe:
    """Convert the values, later layers over earlier ones, and create the sections, which validate
    themselves."""
    values: JsonObject = {"name": name}
    for where, layer in layers:
        for key in sorted(layer, key=lambda key: key not in _MAPPINGS):  # entries join a mapping
            _set(values, key, layer[key], where)
    missing = [key for key in keys() if values.get(key) == _REQUIRED]
    if missing:
        needed = " and ".join(f"{key}=…" for key in missing)
        docs = "; ".join(f"{key}: {keys()[key].doc.partition(';')[0]}" for key in missing)
        raise UserError(f"{COMMAND_LINE}: recipe={name} needs {needed} ({docs})")
    typed = {key for where, layer in layers if where == COMMAND_LINE for key in layer}
    for length, key, share in _LENGTHS:
        if length in typed and key not in typed:
            values[key] = min(values.get(key, keys()[key].default), values[length] // share)
    values["output"] = values.get("output") or f"runs/{values['name']}"
    for key in ("output", "data.path", "trainer.features_path"):
        if values.get(key):
            values[key] = str(expand_path(values[key], key))
    sections: dict[str, JsonObject] = {group: {} for group in GROUPS}
    for key, value in values.items():
        group, _, last = key.rpartition(".")
        sections[group][last] = value
    types = get_type_hints(Recipe)
    top = sections.pop("")
    return Recipe(**top, **{group: types[group](**options) for group, options in sections.items()})


def _set(values: JsonObject, name: str, value: object, where: str) -> None:
    """Convert one value and put it among the values. Raises UserError."""
    if name == "base":
        raise UserError(f"{where}: base belongs in a recipe's file; use recipe=NAME")
    mapping = next((m for m in _MAPPINGS if name.startswith(f"{m}.")), None)
    if name not in keys() and mapping is None:
        near = nearest(name, [*keys(), *filter(None, GROUPS)])
        raise UserError(f"{where}: unknown key {short(name)}{near}")
    if mapping is None:
        values[name] = convert_value(value, keys()[name].type, name, where)
        return
    key = keys()[mapping]
    converted = convert_value(value, get_args(key.type)[1], name, where)
    entry = {name.removeprefix(f"{mapping}."): converted}
    values[mapping] = values.get(mapping, key.default) | entry


def help_text(prog: str, description: str, every: bool = True) -> str:
    """Usage, recipes and keys; unless `every`, without most keys, toy recipes and recipes that
    repeat another for SmolLM2."""
    purpose = " ".join(description.split()).rpartition("…`: ")[2]
    lines = [f"usage: {command(prog)} recipe=NAME [key=value …] [--print]", "", purpose, ""]
    lines.append("recipes (recipe=NAME, or a path to a .yaml):")
    names = list_recipes()
    for name in names:
        is_toy = name.startswith("debug_") and name != "debug_block"
        if every or not (is_toy or name.removeprefix("smollm2_") in {*names} - {name}):
            first, _, _ = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")
            lines += _columns(f"  {name}", 36 if every else 28, first.lstrip("# "))
    lines += ["", "  --print: show the resolved recipe; --help-all: all recipes and keys"]
    lines += ["", "keys:" if every else "common keys:"]
    for key in keys().values() if every else [keys()[name] for name in COMMON_KEYS]:
        title = f"  {key.name}={json.dumps(key.default)}"
        if every:
            lines += [title, f"      {type_name(key.type)}: {key.doc}"]
        else:
            lines += _columns(title, 34, key.doc)
    return "\n".join(lines)


def _columns(name: str, column: int, text: str) -> list[str]:
    """A name, and a text that starts in a column."""
    first = name.ljust(column - 1) + " "
    return textwrap.wrap(text, 110, initial_indent=first, subsequent_indent=" " * column)
