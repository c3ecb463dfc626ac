"""Recipes in: recipes/NAME.yaml, then `key=value` (or `--key=value`, which W&B agents send) on top of it.

Whatever does not fit is one line that names the key, the place and the nearest valid name.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from align.errors import UserError, nearest
from align.files import write_atomically
from align.recipe import GROUPS, Key, Recipe, keys

FOLDER = Path(__file__).resolve().parent.parent / "recipes"


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 1e-3 as a number."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.YAMLError(f"key {key!r} on line {key_node.start_mark.line + 1} is not a name")
        if key in result:
            raise yaml.YAMLError(f"key {key!r} stands twice, again on line {key_node.start_mark.line + 1}")
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def shipped() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def parse_command(argv: Sequence[str], prog: str, description: str) -> Recipe:
    """The recipe of a command line; `--help` and `--print` print and end the process with 0."""
    words = list(argv)
    if not words or any(w in ("-h", "--help") for w in words):
        print(help_text(prog, description))
        raise SystemExit(0)
    show = "--print" in words
    recipe = load_recipe([w for w in words if w != "--print"])
    if show:
        print(yaml.safe_dump(resolve(recipe), sort_keys=False, allow_unicode=True), end="")
        raise SystemExit(0)
    return recipe


def load_recipe(argv: Sequence[str]) -> Recipe:
    """`recipe=NAME key=value …` → a checked recipe.

    Raises:
        UserError: anything that is unknown, of the wrong type, impossible or given twice.
    """
    given = _pairs(argv)
    if "recipe" not in given:
        raise UserError(f"command line: recipe=NAME is missing{nearest('', shipped())}")
    path = find(given.pop("recipe"))
    values: dict[str, tuple[Any, str]] = {}  # dotted key → value, and where it came from
    for file, flat in _with_bases(path):
        for key, value in flat.items():
            values[key] = (value, file.name)
    for key, text in given.items():
        for name, value in _flatten(_yaml(text, f"command line: {key}"), key):
            values[name] = (value, "command line")
    return _build(values, path)


def _pairs(argv: Sequence[str]) -> dict[str, str]:
    """Words to key → text: `key=value`, `--key=value`, `--key value`."""
    given: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        dashed = word.startswith("--")
        key, equals, text = word.lstrip("-").partition("=") if dashed else word.partition("=")
        if not equals:
            if not dashed or not words or "=" in words[0] or words[0].startswith("--"):
                raise UserError(f"command line: {word!r} is not key=value{nearest(key, ['recipe', *keys()])}")
            text = words.pop(0)
        if key.startswith(("+", "~")):
            raise UserError(f"command line: {word!r}: keys can't be added or removed{nearest(key.lstrip('+~'), keys())}")
        if key in given:
            raise UserError(f"command line: {key} is given twice ({given[key]!r} and {text!r})")
        given[key] = text
    return given


def find(name: str) -> Path:
    """The file behind recipe=NAME: a shipped name, or a path to a .yaml."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"recipe={name}: no such file")
        return path
    if not (FOLDER / f"{name}.yaml").is_file():
        raise UserError(f"recipe={name}: no recipe of that name{nearest(name, shipped())}")
    return FOLDER / f"{name}.yaml"


def _with_bases(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The recipe and those it builds on, the first base first, each flattened to dotted keys."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    seen: set[Path] = set()
    current: Path | None = path
    while current is not None:
        if current.resolve() in seen:
            raise UserError(f"{current.name}: base leads back to itself")
        seen.add(current.resolve())
        try:
            text = current.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{current}: can't be read ({error})") from None
        content = _yaml(text, current.name)
        if not isinstance(content, dict):
            raise UserError(f"{current.name}: must hold key: value lines, holds {type(content).__name__}")
        flat = dict(pair for key, value in content.items() for pair in _flatten(value, key))
        chain.insert(0, (current, flat))
        base = flat.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise UserError(f"{current.name}: base={base!r} must be a recipe's name")
        current = None if base is None else find(base)
    return chain


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None


def _flatten(value: Any, key: str) -> list[tuple[str, Any]]:
    """Groups open into dotted keys; other mappings (objective.terms) are values."""
    if key in GROUPS and key:
        if value is None:
            return []
        if not isinstance(value, dict):
            raise UserError(f"{key} is a group of keys, not a value{nearest(f'{key}.', [k for k in keys() if k.startswith(key)])}")
        return [(f"{key}.{name}", v) for name, v in value.items()]
    return [(key, value)]


def _build(values: dict[str, tuple[Any, str]], path: Path) -> Recipe:
    known = keys()
    recipe = Recipe(name=path.stem)
    for name, (value, where) in values.items():
        key = known.get(name)
        if key is None and name.startswith("objective.terms."):  # one entry of the mapping
            number = _convert(value, float, name, where)
            recipe.objective.terms = {**recipe.objective.terms, name.removeprefix("objective.terms."): number}
            continue
        if key is None:
            raise UserError(f"{where}: unknown key {name!r}{nearest(name, known)}")
        group, _, last = name.rpartition(".")
        setattr(getattr(recipe, group) if group else recipe, last, _convert(value, key.type, name, where))
    recipe.output = recipe.output or f"runs/{recipe.name}"
    try:
        recipe.check()
    except UserError as error:
        name = re.split(r"[=: ]", str(error), maxsplit=1)[0]
        name = name if name in known else name.rpartition(".")[0]
        raise UserError(f"{values.get(name, (None, path.name))[1]}: {error}") from None
    return recipe


def _convert(value: Any, kind: Any, name: str, where: str) -> Any:
    """`value` as `kind`, without guessing: an int may stand for a float, a single entry for a list of strings."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _convert(value, next(a for a in arguments if a is not type(None)), name, where)
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        raise UserError(f"{where}: {name}={value!r} is unknown{nearest(str(value), arguments)}")
    if origin is list:
        if isinstance(value, str) and arguments[0] is str:
            value = [part for part in re.split(r"[,\s]+", value) if part]
        if isinstance(value, list):
            return [_convert(v, arguments[0], f"{name}[{i}]", where) for i, v in enumerate(value)]
    elif origin is dict:
        if isinstance(value, dict):
            return {str(k): _convert(v, arguments[1], f"{name}.{k}", where) for k, v in value.items()}
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    elif kind in (bool, str) and isinstance(value, kind):
        return value
    raise UserError(f"{where}: {name}={value!r} must be {_type_name(kind)}")


def _type_name(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _type_name(a) for a in arguments)
    if origin is Literal:
        return "|".join(arguments)
    if origin is list:
        return f"a list of {_type_name(arguments[0])}"
    if origin is dict:
        return "a mapping of names to numbers"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]


def resolve(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, every key present: feeding it back in gives the same recipe."""
    return {key: value for key, value in asdict(recipe).items() if key != "base"}


def help_text(prog: str, description: str) -> str:
    """Usage, the shipped recipes with their first comment line, and every key with type, default and documentation."""
    lines = [f"usage: python -m {prog} recipe=NAME [key=value …] [--print]", "", " ".join(description.split()), "", "recipes:"]
    for name in shipped():
        first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"  {name:<24}{first.lstrip('# ') if first.startswith('#') else ''}")
    lines += ["", "  --print  show the resolved recipe and end", "", "keys:"]
    for key in keys().values():
        lines.append(f"  {key.name}={_show(key)}")
        lines.append(f"      {_type_name(key.type)}: {key.doc}")
    return "\n".join(lines)


def _show(key: Key) -> str:
    return "null" if key.default is None else json.dumps(key.default)


_PACKAGES = ("torch", "lightning", "transformers", "datasets", "deepspeed", "wandb", "safetensors", "numpy")


def versions() -> dict[str, Any]:
    """Python, packages, git commit of this checkout: null for what is absent."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {**found, **_git()}


def _git() -> dict[str, Any]:
    def ask(*words: str) -> str | None:
        try:
            run = subprocess.run(["git", *words], cwd=FOLDER.parent, capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    changed = ask("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"git_commit": commit, "git_dirty": None if changed is None else bool(changed)}


def save_run_record(recipe: Recipe, folder: Path, argv: Sequence[str] | None = None) -> None:
    """Write recipe.yaml (resolved) and versions.json into the run's folder.

    Raises:
        UserError: the folder can't be written.
    """
    text = yaml.safe_dump(resolve(recipe), sort_keys=False, allow_unicode=True)
    record = {**versions(), "argv": list(sys.argv[1:] if argv is None else argv)}
    try:
        write_atomically(folder / "recipe.yaml", lambda part: part.write_text(text, encoding="utf-8"))
        write_atomically(folder / "versions.json", lambda part: part.write_text(json.dumps(record, indent=2) + "\n"))
    except OSError as error:
        raise UserError(f"output={folder}: can't be written ({error.strerror or error})") from None
