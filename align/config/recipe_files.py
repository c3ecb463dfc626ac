"""Recipe files as dotted keys: shipped ones, and a file with its bases."""

from __future__ import annotations

import os
from pathlib import Path

from align.config.recipe import GROUPS, Values, keys
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


def read_with_bases(path: Path) -> list[tuple[Path, Values]]:
    """The recipe and its bases, the first base first, flattened to dotted keys."""
    chain: list[tuple[Path, Values]] = []
    seen: set[Path] = set()
    current: Path | None = path
    while current is not None:
        if current.resolve() in seen:
            raise UserError(f"{current.name}: base is circular")
        seen.add(current.resolve())
        content = parse_yaml(read_text(current), current.name)
        if not isinstance(content, dict):
            raise UserError(f"{current.name}: must contain `key: value` lines")
        flat = flatten_all(content, current.name)
        chain.insert(0, (current, flat))
        kinds = flat.get("kinds", {})
        if not isinstance(kinds, dict) or not all(isinstance(v, dict) for v in kinds.values()):
            raise UserError(f"{current.name}: kinds must contain a group of keys for each kind")
        if kinds:
            flat["kinds"] = {name: flatten_all(v, current.name) for name, v in kinds.items()}
        base = flat.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise UserError(f"{current.name}: base={short(base)} must be a recipe's name")
        current = None if base is None else find(base, f"{current.name}: base", current.parent)
    return chain


def flatten_all(values: Values, where: str) -> Values:
    """Values with groups flattened to dotted keys; other mappings (objective.terms) are values.
    Raises UserError for a key given twice."""
    flat: Values = {}
    for key, value in values.items():
        entries: Values = {key: value}
        if key in GROUPS and key:
            if not isinstance(value, dict | None):
                names = nearest("", [name for name in keys() if name.startswith(f"{key}.")])
                raise UserError(f"{where}: {key}={short(value)}: {key} is a group of keys{names}")
            entries = {f"{key}.{name}": entry for name, entry in (value or {}).items()}
        for name, entry in entries.items():
            if name in flat:
                given = f"{short(flat[name])} and {short(entry)}"
                raise UserError(f"{where}: {name} is given twice ({given})")
            flat[name] = entry
    return flat
