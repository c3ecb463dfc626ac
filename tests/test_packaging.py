"""What an installed copy has to hold: every package, and the recipes beside them."""

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_listed() -> None:
    packages = [ROOT / name for name in ("specalign", "align", "decode")]
    folders = {path.parent for package in packages for path in package.rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    included = SETUPTOOLS["packages"]["find"]["include"]
    for name in names | {"recipes"}:
        assert any(fnmatchcase(name, pattern) for pattern in included), name
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_types_are_taken_along() -> None:
    """PEP 561: type checkers read the annotations of an installed copy."""
    for package in ("specalign", "align", "decode"):
        assert "py.typed" in SETUPTOOLS["package-data"][package]
        assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize(
    "folder",
    [
        "recipes",
        "pretrained",
        "align/planning",
        "align/training",
        "decode/evaluation",
        "decode/verification",
    ],
)
def test_every_recipe_drafter_and_template_is_taken_along(folder: str) -> None:
    patterns = SETUPTOOLS["package-data"][folder.replace("/", ".")]
    taken = {path for pattern in patterns for path in (ROOT / folder).glob(pattern)}
    files = {path for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert taken == {path for path in files if path.suffix not in (".py", ".pyc")}
