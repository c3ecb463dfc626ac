"""Paths, commands, recipes and links in README, CONTRIBUTING and docs/ exist."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from align.config.parser import load_recipe

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "tests" / "contract" / "README.md", *sorted(ROOT.glob("pretrained/*/README.md"))]
TOPS = ("specalign/", "align/", "decode/", "tests/", "recipes/", "docs/", "pretrained/", ".ci/")


def faults(text: str, page: Path) -> list[str]:
    """What the page names that is not there."""
    found = []
    for name in re.findall(r"`([^`\n]+)`", text):
        pattern = re.search(r"[\s…*]|NAME", name)
        if name.startswith(TOPS) and not pattern and not (ROOT / name).exists():
            found.append(f"no file {name}")
    for module in re.findall(r"python -m ((?:specalign|align|decode|tests)[\w.]*)", text):
        path = ROOT.joinpath(*module.split("."))
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            found.append(f"no module {module}")
    for recipe in re.findall(r"recipe=([a-z]\w*)", text):
        if not (ROOT / "recipes" / f"{recipe}.yaml").is_file():
            found.append(f"no recipe {recipe}")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, heading = link.partition("#")
        other = (page.parent / name).resolve() if name else page
        if "://" in link:
            continue
        if not other.exists():
            found.append(f"no page {link}")
        elif heading and heading not in headings(other.read_text(encoding="utf-8")):
            found.append(f"no heading {link}")
    return found


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [*PAGES, *OTHERS], ids=lambda page: page.parent.name + "/" + page.name
)
def test_what_a_page_names_is_there(page: Path) -> None:
    assert faults(page.read_text(encoding="utf-8"), page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_every_training_command_are_valid(page: Path) -> None:
    """Those of the launchers start at tiny size in tests/align/training/parallel/test_launchers.py."""
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"^    .*align\.(?:train|synthesize|features) .*", text, re.MULTILINE):
        words = shlex.split(line.partition("  #")[0].removesuffix(" &").partition("align.")[2])
        load_recipe([word for word in words if "=" in word])


def test_the_api_page_names_what_can_be_imported() -> None:
    for name in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


def test_the_readme_is_read_in_minutes_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 900
    site = {ROOT / "docs" / name for name in ("index.md", "api.md")}  # pages of the site alone
    others = set(PAGES[1:]) - site
    assert [page.name for page in others if f"{page.relative_to(ROOT)})" not in readme] == []
