"""Recipe files as dotted keys: shipped ones, and a file with its bases."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from align.config.recipe import GROUPS, keys
from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.common.strict_yaml import parse_yaml
from specalign.common.text import short

FOLDER = Path(__file__).resolve().parents[2] / "recipes"


def shipped() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str, where: str, folder: Path | None = None) -> Path:
    """The file behind recipe=NAME or base: NAME: a shipped name, or a path to a .yaml (relative to
    `folder`).

    Raises:
        UserError: there is none; the message begins with `where`.
    """
    is_yaml = name.endswith((".yaml", ".yml"))
    is_path = is_yaml or "/" in name
    try:
        path = (
            (folder or Path()) / expand_path(name, f"{where}: recipe")
            if is_path
            else FOLDER / f"{name}.yaml"
        )
        if path.is_file() and (is_yaml or not is_path):
            return path
        other = ((folder or Path()) / name).is_file()
    except OSError as error:  # a name too long
        raise UserError(
            f"{where}: recipe {short(name)} can't be read ({error.strerror or error})"
        ) from None
    if other:
        near = nearest(Path(name).stem, shipped())
        near = " (block for instance; --help lists them)" if "one of" in near else near
        raise UserError(
            f"{where}: {short(name)} is not a recipe: give a shipped recipe's name or a .yaml "
            f"file{near}"
        )
    if is_path:
        near = nearest(Path(name).stem, shipped()) if Path(name).name == name else ""
        raise UserError(
            f"{where}: recipe {short(name)}: no such file{'' if 'one of' in near else near}"
        )
    raise UserError(f"{where}: recipe {short(name)} is unknown{nearest(name, shipped())}")


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
        if (kinds := flat.pop("kinds", None)) is not None:
            flat["kinds"] = _read_kinds(kinds, current.name)
        base = flat.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise UserError(f"{current.name}: base={short(base)} must be a recipe's name")
        current = None if base is None else find(base, f"{current.name}: base", current.parent)
    return chain


def _read_kinds(kinds: Any, where: str) -> dict[str, dict[str, Any]]:
    """A file's section for each kind of drafter, as dotted keys."""
    if not isinstance(kinds, dict) or not all(isinstance(part, dict) for part in kinds.values()):
        raise UserError(f"{where}: kinds must contain a group of keys for each kind of drafter")
    return {
        name: unique(
            [pair for key, value in part.items() for pair in flatten(value, key, where)], where
        )
        for name, part in kinds.items()
    }


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
        raise UserError(
            f"{path.name}: is empty; a recipe has lines like `trainer: {{max_steps: 1000}}`"
        )
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "one value"
        raise UserError(f"{path.name}: must contain `key: value` lines, not {kind}")
    pairs = [pair for key, value in content.items() for pair in flatten(value, key, path.name)]
    return unique(pairs, path.name)


def flatten(value: Any, key: str, where: str) -> list[tuple[str, Any]]:
    """Flatten groups to dotted keys; other mappings (objective.terms) are values."""
    if key not in GROUPS or not key:
        return [(key, value)]
    if value is None:
        return []
    if not isinstance(value, dict):
        names = nearest("", [name for name in keys() if name.startswith(f"{key}.")])
        raise UserError(f"{where}: {key}={short(value)}: {key} is a group of keys{names}")
    return [(f"{key}.{name}", entry) for name, entry in value.items()]


def unique(pairs: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
    """The pairs as a mapping. Raises UserError for a key given twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UserError(
                f"{where}: {key} is given twice ({short(found[key])} and {short(value)})"
            )
        found[key] = value
    return found
