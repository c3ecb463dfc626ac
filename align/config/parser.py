"""Recipes in: recipes/NAME.yaml, then `key=value` on top of it, in every form that W&B's agents send.

Whatever does not fit is one line that names the key, the place and the nearest valid name.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from align.common.commands import command
from align.common.errors import UserError, nearest
from align.common.files import expand_path
from align.common.hub import DEFAULT_TARGET
from align.common.schema import SHORT_DTYPES, convert, type_name
from align.common.strict_yaml import dump_yaml
from align.common.text import say, short
from align.config.arguments import COMMAND_LINE, as_text, read_arguments, read_value
from align.config.derived import check_required, insert_kind, shorten_to_run
from align.config.drafter import DrafterConfig
from align.config.hardware import gpu_count
from align.config.recipe import Recipe, keys, resolve
from align.config.recipe_files import FOLDER, find, flatten, read_with_bases, shipped, unique
from align.config.rules import check
from align.config.wandb_runs import separate_trial, unsent_parameters

_MAPPINGS = ("objective.terms", "trainer.learning_rates", "data.template_kwargs")
"""Keys whose entries may be given one by one: `objective.terms.forward_kl=1`."""


def parse_command(argv: Sequence[str], prog: str, description: str) -> Recipe | None:
    """The recipe of a command line; None after `--help` and `--print`, which print: the command ends then.

    Raises:
        UserError: see `load_recipe`.
    """
    words = list(argv)
    if {"-h", "--help", "--help-all"} & {*words}:
        say(help_text(prog, description, every="--help-all" in words))
        return None
    recipe = load_recipe([w for w in words if w != "--print"])
    if "--print" in words:
        say(dump_yaml(resolve(recipe)), end="")
        return None
    return recipe


def load_recipe(argv: Sequence[str]) -> Recipe:
    """`recipe=NAME key=value …` → a checked recipe; the command line wins over the file, that over its base.

    Raises:
        UserError: anything that is unknown, of the wrong type, impossible or given twice.
    """
    given = read_arguments(argv, shipped())
    given |= {key: as_text(value) for key, value in unsent_parameters(given).items()}
    if "recipe" not in given:
        raise UserError(
            f"{COMMAND_LINE}: recipe=NAME is missing (recipe=block for instance; --help lists them, --help-all shows all keys)"
        )
    path = find(given.pop("recipe"), COMMAND_LINE)
    layers = [(file.name, flat) for file, flat in read_with_bases(path)]
    pairs = [pair for key, text in given.items() for pair in flatten(_parse(key, text), key, COMMAND_LINE)]
    layers.append((COMMAND_LINE, unique(pairs, COMMAND_LINE)))
    typed = layers[-1][1]
    layers = insert_kind(layers, _shipped_drafter)
    values: dict[str, tuple[Any, str]] = {}  # dotted key → value, and where it came from
    order: dict[str, int] = {}
    for number, (where, flat) in enumerate(layers):
        order |= dict.fromkeys(flat, number)
        for key in sorted(flat, key=lambda key: key not in _MAPPINGS):  # the mapping, then its entries
            if key in _MAPPINGS:
                values = {k: v for k, v in values.items() if not k.startswith(f"{key}.")}
            values.pop(key, None)
            values[key] = (flat[key], where)
    named = [flat["target.name"] for where, flat in layers if where != COMMAND_LINE and "target.name" in flat]
    _keep_apart(values, named[-1] if named else DEFAULT_TARGET)
    recipe = _build(values, order, path)
    separate_trial(recipe, typed)
    return recipe


def _parse(key: str, text: str) -> Any:
    """An argument's value. For a list, a path that exists is taken as it is: YAML may read it as something else."""
    kind = keys()[key].type if key in keys() else None
    if get_origin(kind) is list and str in get_args(kind) and _exists(text):
        return text
    return read_value(key, text)


def _shipped_drafter(name: str) -> DrafterConfig | None:
    """The drafter group of a shipped recipe; None = there is no such recipe."""
    return (
        load_recipe([f"recipe={name}", f"target.name={DEFAULT_TARGET}"]).drafter
        if name in shipped()
        else None
    )


def _keep_apart(values: dict[str, tuple[Any, str]], own: object) -> None:
    """A recipe's data.path holds text of its `own` target, and other recipes read it too: for another target the folder has its name."""
    (folder, of), (name, _) = values.get("data.path", (None, "")), values.get("target.name", (own, ""))
    if name != own and isinstance(name, str) and isinstance(folder, str) and of != COMMAND_LINE:
        named = re.sub(r"[^\w.-]+", "--", name.strip("/"))[-80:]
        values["data.path"] = (f"{folder}-{named}", of)


def _build(values: dict[str, tuple[Any, str]], order: dict[str, int], path: Path) -> Recipe:
    known = keys()
    recipe = Recipe(name=path.stem)
    for name, (value, where) in values.items():
        key = known.get(name)
        if name == "base":
            raise UserError(f"{where}: base stands in a recipe's file; choose a recipe with recipe=NAME")
        mapping = next((m for m in _MAPPINGS if name.startswith(f"{m}.")), None)
        if key is None and mapping is not None:  # one entry of it
            kind, (part, _, field) = get_args(known[mapping].type)[1], mapping.partition(".")
            own, entry = getattr(recipe, part), name.removeprefix(f"{mapping}.")
            setattr(own, field, {**getattr(own, field), entry: _convert(value, kind, name, where)})
            continue
        if key is None:
            groups = {other.partition(".")[0] for other in known}
            raise UserError(f"{where}: unknown key {short(name)}{nearest(name, [*known, *groups])}")
        group, _, last = name.rpartition(".")
        if (name, value) == ("launch.devices", "auto"):
            value = max(1, gpu_count()) if values.get("launch.accelerator", ("auto", ""))[0] != "cpu" else 1
        setattr(getattr(recipe, group) if group else recipe, last, _convert(value, key.type, name, where))
    check_required(values, f"recipe={path.stem}")
    shorten_to_run(recipe, order)
    try:
        check(recipe)
        recipe.output = str(expand_path(recipe.output or f"runs/{recipe.name}", "output"))
        recipe.data.path = recipe.data.path and str(expand_path(recipe.data.path, "data.path"))
        t = recipe.trainer
        t.features_path = t.features_path and str(expand_path(t.features_path, "trainer.features_path"))
    except UserError as error:
        # Of the keys that the line names, the first that was given somewhere: the others are defaults.
        words = re.findall(r"[\w.]+", str(error))
        named = [key for word in words for key in (word, word.rpartition(".")[0]) if key in values]
        raise UserError(f"{values[named[0]][1] if named else path.name}: {error}") from None
    return recipe


def _split_list(text: str, are_paths: bool) -> list[str]:
    """The entries of a list that is given as one text, split at commas and blanks.

    Nothing is split that exists as a path. Of paths, what blanks separate is split only where a piece
    exists or each may be a hub id, so that a misspelt path is named whole.
    """
    if _exists(text):
        return [text]
    found = list[str]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        pieces = part.split()
        whole = are_paths and not any(map(_exists, pieces)) and not all("/" in piece for piece in pieces)
        found += [part] if whole or _exists(part) else pieces
    return found


def _exists(path: str) -> bool:
    try:
        return bool(path.strip()) and expand_path(path).exists()
    except (OSError, UserError):  # a name that no file can have
        return False


def _convert(value: Any, kind: Any, name: str, where: str) -> Any:
    """`value` as `kind`; one text may stand for a list of texts, a whole float (`6.0`, `1e3`) for an integer."""
    value = _with_integers(value, kind)
    if isinstance(value, str) and str in [
        a for k in (kind, *get_args(kind)) if get_origin(k) is list for a in get_args(k)
    ]:
        value = _split_list(value, are_paths=name in ("data.text", "data.exclude"))
    if get_origin(kind) is Literal and value not in get_args(kind) and isinstance(value, str):
        same = next(({*pair} for pair in SHORT_DTYPES.items() if value in pair), set())
        value = next((other for other in same if other in get_args(kind)), value)
    return convert(value, kind, name, where)


def _with_integers(value: Any, kind: Any) -> Any:
    """Turn whole floats into integers where `kind` asks for integers: W&B draws them for q_uniform."""
    if isinstance(value, float) and value.is_integer() and int in (kind, *get_args(kind)):
        return int(value)
    if isinstance(value, list):
        inner = next((k for k in (kind, *get_args(kind)) if get_origin(k) is list), None)
        return [_with_integers(item, get_args(inner)[0]) for item in value] if inner else value
    return value


MOST_USED = (
    "output", "target.name", "data.samples", "data.prompts", "data.path", "drafter.init", "drafter.block_size",
    "trainer.max_steps", "trainer.max_minutes",
)  # fmt: skip
"""The keys that the short help shows."""
_WIDTH = 110
"""Characters of a line of the short help."""


def _beside(name: str, column: int, text: str) -> list[str]:
    """A name and, from this column on, a text."""
    first = name.ljust(column - 1) + " "
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * column) or [name]


def help_text(prog: str, description: str, every: bool = True) -> str:
    """Usage, recipes with their first comment line, keys with type, default, documentation. Without `every` the keys that are used
    most, one toy recipe, and no recipe that is another one for SmolLM2."""
    usage = f"usage: {command(prog)} recipe=NAME [key=value …] [--print]"
    purpose = " ".join(description.split()).rpartition("…`: ")[2]
    lines = [usage, "", purpose, "", "recipes (recipe=NAME, or a path to a .yaml):"]
    for name in shipped():
        toy = name.startswith("debug_") and name != "debug_block"
        if not every and (toy or name.removeprefix("smollm2_") in {*shipped()} - {name}):
            continue  # smollm2_NAME is NAME for one target
        first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        about = first.lstrip("# ") if first.startswith("#") else ""
        lines += [f"  {name:<34}{about}"] if every else _beside(f"  {name}", 28, about)
    lines += ["", "  --print: show the resolved recipe and end; --help-all: all recipes and keys"]
    lines += ["", "keys:" if every else "the keys most used:"]
    for key in keys().values() if every else [keys()[name] for name in MOST_USED]:
        words = f"{key.name}={'null' if key.default is None else json.dumps(key.default)}"
        if not every:
            lines += _beside(f"  {words}", 34, key.doc)
            continue
        lines += [f"  {words}", f"      {type_name(key.type)}: {key.doc}"]
    return "\n".join(lines)
