"""Commands of docs/scale.md and docs/data.md at tiny size, as written there. Those that start training:
tests/align/training/parallel/test_launchers.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from align.config.parser import load_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
)
def test_options_of_every_training_command_are_valid(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for line in re.findall(r"^    .*align\.(?:train|synthesize|features) .*", text, re.MULTILINE):
        words = shlex.split(line.partition("  #")[0].removesuffix(" &").partition("align.")[2])
        load_recipe([word for word in words if "=" in word])
