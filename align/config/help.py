"""Help of the commands that take a recipe."""

from __future__ import annotations

import json
import textwrap

from align.config.recipe import keys
from align.config.recipe_files import FOLDER, list_recipes
from specalign.common.commands import command
from specalign.common.schema import type_name

COMMON_KEYS = (
    "output", "target.name", "data.samples", "data.prompts", "data.path", "drafter.init", "drafter.block_size",
    "trainer.max_steps", "trainer.max_minutes",
)  # fmt: skip
"""Keys of the short help."""


def help_text(prog: str, description: str, every: bool = True) -> str:
    """Usage, recipes and keys; unless `every`, without most keys, toy recipes and recipes that
    repeat another for SmolLM2."""
    usage = f"usage: {command(prog)} recipe=NAME [key=value …] [--print]"
    purpose = " ".join(description.split()).rpartition("…`: ")[2]
    lines = [usage, "", purpose, "", "recipes (recipe=NAME, or a path to a .yaml):"]
    names = list_recipes()
    for name in names:
        is_toy = name.startswith("debug_") and name != "debug_block"
        if every or not (is_toy or name.removeprefix("smollm2_") in {*names} - {name}):
            first, _, _ = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")
            lines += _columns(f"  {name}", 36 if every else 28, first.lstrip("# "))
    lines += ["", "  --print: show the resolved recipe; --help-all: all recipes and keys"]
    lines += ["", "keys:" if every else "common keys:"]
    for key in keys().values() if every else [keys()[name] for name in COMMON_KEYS]:
        title = f"  {key.name}={json.dumps(key.default)}"
        if every:
            lines += [title, f"      {type_name(key.type)}: {key.doc}"]
        else:
            lines += _columns(title, 34, key.doc)
    return "\n".join(lines)


def _columns(name: str, column: int, text: str) -> list[str]:
    """A name, and a text that starts in a column."""
    first = name.ljust(column - 1) + " "
    return textwrap.wrap(text, 110, initial_indent=first, subsequent_indent=" " * column)
