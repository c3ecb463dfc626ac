"""Recipe files as dotted keys: shipped ones, and a file with its bases."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from align.config.recipe import GROUPS, keys
from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path, read_text
from specalign.common.strict_yaml import parse_yaml
from specalign.common.text import short

FOLDER = Path(__file__).resolve().parents[2] / "recipes"


def list_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str, where: str, folder: Path | None = None) -> Path:
    """The file behind recipe=NAME or base: NAME: a shipped name, or a path to a .yaml (relative to
    `folder`). Raises UserError: there is none; the message begins with `where`."""
    is_yaml = name.endswith((".yaml", ".yml"))
    path = FOLDER / f"{name}.yaml"
    if is_yaml or "/" in name:
        path = (folder or Path()) / expand_path(name, f"{where}: recipe")
    if os.path.isfile(path) and path.suffix in (".yaml", ".yml"):
        return path
    near = nearest(Path(name).stem, list_recipes())
    raise UserError(f"{where}: recipe {short(name)}: no such recipe or .yaml file{near}")


def read_with_bases(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The recipe and its bases, the first base first, flattened to dotted keys."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    seen: set[Path] = set()
    current: Path | None = path
    while current is not None:
        if current.resolve() in seen:
            raise UserError(f"{current.name}: base is circular")
        seen.add(current.resolve())
        flat = _read(current)
        chain.insert(0, (current, flat))
        if "kinds" in flat:
            flat["kinds"] = _read_kinds(flat["kinds"], current.name)
        base = flat.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise UserError(f"{current.name}: base={short(base)} must be a recipe's name")
        current = None if base is None else find(base, f"{current.name}: base", current.parent)
    return chain


def _read_kinds(kinds: Any, where: str) -> dict[str, dict[str, Any]]:
    """A file's section for each kind of drafter, as dotted keys."""
    if not isinstance(kinds, dict) or not all(isinstance(part, dict) for part in kinds.values()):
        raise UserError(f"{where}: kinds must contain a group of keys for each kind of drafter")
    return {name: flatten_all(part, where) for name, part in kinds.items()}


def _read(path: Path) -> dict[str, Any]:
    """One recipe file as dotted keys."""
    content = parse_yaml(read_text(path), path.name)
    if not isinstance(content, dict):
        raise UserError(f"{path.name}: must contain `key: value` lines")
    return flatten_all(content, path.name)


def flatten_all(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Values with groups flattened to dotted keys. Raises UserError for a key given twice."""
    pairs = [pair for key, value in values.items() for pair in _flatten(value, key, where)]
    return _to_mapping(pairs, where)


def _flatten(value: Any, key: str, where: str) -> list[tuple[str, Any]]:
    """Flatten groups to dotted keys; other mappings (objective.terms) are values."""
    if key not in GROUPS or not key:
        return [(key, value)]
    if value is None:
        return []
    if not isinstance(value, dict):
        names = nearest("", [name for name in keys() if name.startswith(f"{key}.")])
        raise UserError(f"{where}: {key}={short(value)}: {key} is a group of keys{names}")
    return [(f"{key}.{name}", entry) for name, entry in value.items()]


def _to_mapping(pairs: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            values = f"{short(found[key])} and {short(value)}"
            raise UserError(f"{where}: {key} is given twice ({values})")
        found[key] = value
    return found
