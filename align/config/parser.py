"""Recipes in: recipes/NAME.yaml, then `key=value` (or `--key=value`, which W&B agents send) on top of it.

Whatever does not fit is one line that names the key, the place and the nearest valid name.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from align.common.commands import command
from align.common.errors import UserError, nearest
from align.common.files import expanded
from align.common.hub import DEFAULT_TARGET
from align.common.schema import SHORT_DTYPES, convert, type_name
from align.common.strict_yaml import dump_yaml, parse_yaml
from align.common.text import say, short
from align.config.hardware import gpu_count
from align.config.recipe import GROUPS, Recipe, keys, resolve
from align.config.rules import check

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
_COMMAND = "command line"
_MAPPINGS = ("objective.terms", "trainer.learning_rates", "data.template_kwargs")
"""Keys whose entries may be given one by one: `objective.terms.forward_kl=1`."""


def shipped() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


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
    given = _pairs(argv)
    if "recipe" not in given:
        raise UserError(
            f"{_COMMAND}: recipe=NAME is missing (recipe=smollm2_block for instance; --help lists them, --help-all shows all keys)"
        )
    path = find(given.pop("recipe"), _COMMAND)
    layers = [(file.name, flat) for file, flat in _with_bases(path)]
    pairs = [pair for key, text in given.items() for pair in _flatten(_word(key, text), key, _COMMAND)]
    layers.append((_COMMAND, _unique(pairs, _COMMAND)))
    values: dict[str, tuple[Any, str]] = {}  # dotted key → value, and where it came from
    for where, flat in layers:
        for key in sorted(flat, key=lambda key: key not in _MAPPINGS):  # the mapping, then its entries
            if key in _MAPPINGS:
                values = {k: v for k, v in values.items() if not k.startswith(f"{key}.")}
            values.pop(key, None)
            values[key] = (flat[key], where)
    files = (flat["target.name"] for _, flat in reversed(layers[:-1]) if "target.name" in flat)
    _keep_apart(values, next(files, DEFAULT_TARGET))
    return _build(values, path)


def _keep_apart(values: dict[str, tuple[Any, str]], own: object) -> None:
    """A recipe's data.path holds text of its `own` target, and other recipes read it too: for another target the folder has its name."""
    (folder, of), (name, _) = values.get("data.path", (None, "")), values.get("target.name", (own, ""))
    if name != own and isinstance(name, str) and isinstance(folder, str) and of != _COMMAND:
        named = re.sub(r"[^\w.-]+", "--", name.strip("/"))[-80:]
        values["data.path"] = (f"{folder}-{named}", of)


def _pairs(argv: Sequence[str]) -> dict[str, str]:
    """Words to key → text: `key=value`, `--key=value`, `--key value`."""
    given: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        dashed = word.startswith("--")
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            if not dashed or not words or "=" in words[0] or words[0].startswith("--"):
                known = [
                    *keys(),
                    "recipe",
                    *(f"recipe={p.stem}" for p in FOLDER.glob("*.yaml")),
                    "--help",
                    "--help-all",
                    "--print",
                ]
                near = nearest(f"recipe={key}" if (FOLDER / f"{key}.yaml").is_file() else word, known)
                if key in (*keys(), "recipe"):
                    near = f" (write {key}=VALUE, without spaces)"
                raise UserError(f"{_COMMAND}: {short(word)} is not key=value{near}")
            text = words.pop(0)
        if key.startswith(("+", "~")):
            bare = nearest(key.lstrip("+~"), keys())
            raise UserError(f"{_COMMAND}: {short(word)}: keys can't be added or removed{bare}")
        if key in given:
            raise UserError(f"{_COMMAND}: {key} is given twice ({short(given[key])} and {short(text)})")
        given[key] = text
    return given


def _word(key: str, text: str) -> Any:
    """The value of a word: YAML, save that a key of text takes anything (`output=2024`)."""
    kind = keys()[key].type if key in keys() else None
    optional = type(None) in get_args(kind)
    if optional and text in ("", "~", "null", "None"):  # None: how W&B's agent spells it
        return None
    if str in (kind, *get_args(kind)) and get_origin(kind) not in (list, dict) and text[:1] not in ("'", '"'):
        return text
    if not text and key in keys():
        raise UserError(f"{_COMMAND}: {key}= has no value; it must be {type_name(kind)}")
    return parse_yaml(text, f"{_COMMAND}: {key}")


def find(name: str, where: str, beside: Path | None = None) -> Path:
    """The file behind recipe=NAME or base: NAME: a shipped name, or a path to a .yaml (relative to `beside`).

    Raises:
        UserError: there is none; the line begins with `where`.
    """
    is_yaml = name.endswith((".yaml", ".yml"))
    is_path = is_yaml or "/" in name
    try:
        path = (beside or Path()) / expanded(name, f"{where}: recipe") if is_path else FOLDER / f"{name}.yaml"
        if path.is_file() and (is_yaml or not is_path):
            return path
        other = ((beside or Path()) / name).is_file()
    except OSError as error:  # a name too long
        raise UserError(f"{where}: recipe {short(name)} can't be read ({error.strerror or error})") from None
    if other:
        near = nearest(Path(name).stem, shipped())
        near = " (smollm2_block for instance; --help lists them)" if "one of" in near else near
        raise UserError(
            f"{where}: {short(name)} is no recipe, which is a shipped one's name or a .yaml file{near}"
        )
    if is_path:
        near = nearest(Path(name).stem, shipped()) if Path(name).name == name else ""
        raise UserError(f"{where}: recipe {short(name)}: no such file{'' if 'one of' in near else near}")
    raise UserError(f"{where}: recipe {short(name)} is unknown{nearest(name, shipped())}")


def _with_bases(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The recipe and those it builds on, the first base first, each flattened to dotted keys."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    seen: set[Path] = set()
    current: Path | None = path
    while current is not None:
        if current.resolve() in seen:
            raise UserError(f"{current.name}: base leads back to itself")
        seen.add(current.resolve())
        flat = _read(current)
        chain.insert(0, (current, flat))
        base = flat.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise UserError(f"{current.name}: base={short(base)} must be a recipe's name")
        current = None if base is None else find(base, f"{current.name}: base", current.parent)
    return chain


def _read(path: Path) -> dict[str, Any]:
    """One recipe file as dotted keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path.name}: is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from None
    content = parse_yaml(text, path.name)
    if content is None:
        raise UserError(f"{path.name}: is empty; a recipe holds lines like `trainer: {{max_steps: 1000}}`")
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "one value"
        raise UserError(f"{path.name}: must hold `key: value` lines, holds {kind}")
    pairs = [pair for key, value in content.items() for pair in _flatten(value, key, path.name)]
    return _unique(pairs, path.name)


def _flatten(value: Any, key: str, where: str) -> list[tuple[str, Any]]:
    """Groups open into dotted keys; other mappings (objective.terms) are values."""
    if key not in GROUPS or not key:
        return [(key, value)]
    if value is None:
        return []
    if not isinstance(value, dict):
        names = nearest("", [name for name in keys() if name.startswith(f"{key}.")])
        raise UserError(f"{where}: {key}={short(value)}: {key} is a group of keys{names}")
    return [(f"{key}.{name}", entry) for name, entry in value.items()]


def _unique(pairs: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UserError(f"{where}: {key} is given twice ({short(found[key])} and {short(value)})")
        found[key] = value
    return found


def _build(values: dict[str, tuple[Any, str]], path: Path) -> Recipe:
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
    try:
        check(recipe)
        recipe.output = str(expanded(recipe.output or f"runs/{recipe.name}", "output"))
        recipe.data.path = recipe.data.path and str(expanded(recipe.data.path, "data.path"))
        t = recipe.trainer
        t.features_path = t.features_path and str(expanded(t.features_path, "trainer.features_path"))
    except UserError as error:
        # Of the keys that the line names, the first that was given somewhere: the others are defaults.
        words = re.findall(r"[\w.]+", str(error))
        named = [key for word in words for key in (word, word.rpartition(".")[0]) if key in values]
        raise UserError(f"{values[named[0]][1] if named else path.name}: {error}") from None
    return recipe


def _convert(value: Any, kind: Any, name: str, where: str) -> Any:
    """`value` as `kind`; one text may stand for a list of texts."""
    if isinstance(value, str) and str in [
        a for k in (kind, *get_args(kind)) if get_origin(k) is list for a in get_args(k)
    ]:
        value = [part for part in re.split(r"[,\s]+", value) if part]
    if get_origin(kind) is Literal and value not in get_args(kind) and isinstance(value, str):
        same = next(({*pair} for pair in SHORT_DTYPES.items() if value in pair), set())
        value = next((other for other in same if other in get_args(kind)), value)
    return convert(value, kind, name, where)


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
    """Usage, recipes with their first comment line, keys with type, default, documentation. Without `every` the keys that
    are used most, and of the toy recipes one."""
    usage = f"usage: {command(prog)} recipe=NAME [key=value …] [--print]"
    purpose = " ".join(description.split()).rpartition("…`: ")[2]
    lines = [usage, "", purpose, "", "recipes (recipe=NAME, or a path to a .yaml):"]
    for name in shipped():
        if not every and name.startswith("debug_") and name != "debug_block":
            continue
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
