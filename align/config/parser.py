"""Reading a recipe: recipes/NAME.yaml and the files that it starts from, then the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args, get_origin, get_type_hints

from align.config.arguments import COMMAND_LINE, as_text, read_arguments, read_value
from align.config.derived import Layer, Sections, Value, check_required, insert_kind, shorten_to_run
from align.config.drafter import DrafterConfig
from align.config.hardware import gpu_count
from align.config.help import help_text
from align.config.recipe import GROUPS, Recipe, keys, resolve
from align.config.recipe_files import find, flatten_all, list_recipes, read_with_bases
from align.config.wandb_runs import read_agent_parameters, separate_trial
from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.common.hub import DEFAULT_TARGET
from specalign.common.schema import SHORT_DTYPES, convert
from specalign.common.strict_yaml import dump_yaml
from specalign.common.text import say, short

_MAPPINGS = ("objective.terms", "data.template_kwargs")
"""Keys whose entries can be given one by one: `objective.terms.forward_kl=1`."""
_PATHS = ("data.text", "data.exclude")
"""Lists of paths, which may contain spaces."""


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
    values = {key: _parse(key, text) for key, text in given.items()}
    arguments = flatten_all(values, COMMAND_LINE)
    layers = [(file.name, flat) for file, flat in read_with_bases(path)]
    layers = insert_kind([*layers, (COMMAND_LINE, arguments)], _load_shipped_drafter)
    merged = _merge(layers)
    recipe = _build(merged, path.stem)
    separate_trial(recipe, arguments)
    return recipe


def _parse(key: str, text: str) -> object:
    """An argument's value. For a list, an existing path is taken as it is: YAML might read
    something else."""
    kind = keys()[key].type if key in keys() else None
    is_texts = get_origin(kind) is list and str in get_args(kind)
    return text if is_texts and _exists(text) else read_value(key, text)


def _load_shipped_drafter(name: str) -> DrafterConfig | None:
    if name not in list_recipes():
        return None
    return load_recipe([f"recipe={name}", f"target.name={DEFAULT_TARGET}"]).drafter


def _merge(layers: list[Layer]) -> dict[str, Value]:
    """The value of each key from the last layer that has it."""
    merged: dict[str, Value] = {}
    for number, (where, flat) in enumerate(layers):
        mappings = [key for key in flat if key in _MAPPINGS]  # they replace earlier entries
        for mapping in mappings:
            merged = {k: v for k, v in merged.items() if not k.startswith(f"{mapping}.")}
        for key in (*mappings, *(key for key in flat if key not in _MAPPINGS)):
            merged.pop(key, None)
            merged[key] = Value(flat[key], where, number)
    return merged


def _build(values: dict[str, Value], name: str) -> Recipe:
    """Convert the values and create the sections, which validate themselves."""
    sections: Sections = {group: {} for group in GROUPS}
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
        folder = sections[group].get(key)
        if folder:
            sections[group][key] = str(expand_path(folder, f"{group}.{key}"))
    types = get_type_hints(Recipe)
    return Recipe(**top, **{group: types[group](**options) for group, options in sections.items()})


def _set(sections: Sections, name: str, value: object, where: str) -> None:
    """Convert one value and put it into its section. Raises UserError."""
    if name == "base":
        raise UserError(f"{where}: base belongs in a recipe's file; use recipe=NAME")
    mapping = next((m for m in _MAPPINGS if name.startswith(f"{m}.")), None)
    if name not in keys() and mapping is None:
        near = nearest(name, [*keys(), *filter(None, GROUPS)])
        raise UserError(f"{where}: unknown key {short(name)}{near}")
    key = keys()[mapping or name]
    group, _, last = key.name.rpartition(".")
    if mapping is None:
        sections[group][last] = _convert(value, key.type, name, where)
        return
    entry = name.removeprefix(f"{mapping}.")
    converted = _convert(value, get_args(key.type)[1], name, where)
    sections[group][last] = {**sections[group].get(last, key.default), entry: converted}


def _convert(value: object, kind: object, name: str, where: str) -> object:
    """`value` as `kind`; a text may stand for a list of texts, a short for a long dtype, and a
    whole float (`6.0`, `1e3`) for an integer."""
    value = _with_integers(value, kind)
    kinds = (kind, *get_args(kind))
    if isinstance(value, str):
        if any(get_origin(k) is list and str in get_args(k) for k in kinds):
            value = _split_list(value, are_paths=name in _PATHS)
        elif get_origin(kind) is Literal and value not in get_args(kind):
            long_to_short = {long: short for short, long in SHORT_DTYPES.items()}
            other = (SHORT_DTYPES | long_to_short).get(value)
            value = other if other in get_args(kind) else value
    return convert(value, kind, name, where)


def _with_integers(value: object, kind: object) -> object:
    """Whole floats as integers where `kind` asks for integers: W&B draws floats for q_uniform."""
    kinds = (kind, *get_args(kind))
    if isinstance(value, float) and value.is_integer() and int in kinds:
        return int(value)
    lists = [k for k in kinds if get_origin(k) is list]
    if isinstance(value, list) and lists:
        return [_with_integers(item, get_args(lists[0])[0]) for item in value]
    return value


def _split_list(text: str, are_paths: bool) -> list[str]:
    """Split at commas, and at spaces unless the entries are paths; an existing path stays whole."""
    if _exists(text):
        return [text]
    entries = [part.strip() for part in text.split(",") if part.strip()]
    return entries if are_paths else [word for entry in entries for word in entry.split()]


def _exists(path: str) -> bool:
    try:
        return bool(path.strip()) and expand_path(path).exists()
    except (OSError, UserError):  # not a possible file name
        return False
