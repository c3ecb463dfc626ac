"""What an installed copy has to hold: every package, and the recipes beside them."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_listed() -> None:
    folders = {path.parent for room in ("align", "decode") for path in (ROOT / room).rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    included = SETUPTOOLS["packages"]["find"]["include"]
    for name in names | {"recipes"}:
        assert any(fnmatchcase(name, pattern) for pattern in included), name
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_types_are_taken_along() -> None:
    """PEP 561: type checkers read the annotations of an installed copy."""
    for package in ("align", "decode"):
        assert (
            "py.typed" in SETUPTOOLS["package-data"][package]
            and (ROOT / package / "py.typed").is_file()
        )


def test_every_recipe_is_taken_along() -> None:
    taken = {
        path
        for pattern in SETUPTOOLS["package-data"]["recipes"]
        for path in (ROOT / "recipes").glob(pattern)
    }
    assert taken == {path for path in (ROOT / "recipes").rglob("*") if path.is_file()}
