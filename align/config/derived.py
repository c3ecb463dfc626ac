"""Values that follow from other keys: the section for the drafter's kind, and sizes chosen for a longer run. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from align.common.errors import UserError, nearest
from align.config.drafter import DrafterConfig
from align.config.recipe import Recipe, keys
from align.importing.kinds import DrafterKind, kind_of_drafter

Layer = tuple[str, dict[str, Any]]
"""Where values stand, a file's name or the command line, and the values by dotted key."""
KINDS = ("shared_kv", "taps", "masked_lm", "ddit", "autoregressive")
"""Sections under `kinds` in a recipe's file: the contexts of block drafters, and the other kinds."""
REQUIRED = "???"
"""In a recipe's file: the user must give this value."""


def insert_kind(layers: list[Layer], recipe_drafter: Callable[[str], DrafterConfig | None]) -> list[Layer]:
    """The layers without `kinds`; its section for this drafter follows the file that has it, so that everything later wins.

    `drafter.kind: auto` becomes the kind of `drafter.init`.

    Args:
        layers: bases first, the command line last. `kinds` holds a mapping of dotted keys for each name.
        recipe_drafter: the drafter group of a shipped recipe by its name; None = there is no such recipe.

    Raises:
        UserError: a section for an unknown kind, or `drafter.kind: auto` without a drafter to look at.
    """
    given = {key: value for _, flat in layers for key, value in flat.items()}
    kind, init = given.get("drafter.kind", "block"), given.get("drafter.init")
    derived: dict[str, Any] = {}
    if kind == "auto":
        if not isinstance(init, str):
            raise UserError("drafter.kind=auto is the kind of drafter.init: name a drafter there")
        found = _kind_of(init, recipe_drafter)
        derived = {"drafter.kind": found.kind}
        if found.block_size is not None:
            derived["drafter.block_size"] = found.block_size
    else:
        context = str(given.get("drafter.context", "shared_kv")) if kind == "block" else None
        found = DrafterKind(str(kind), context)
    inserted: list[Layer] = []
    for where, flat in layers:
        sections = flat.get("kinds", {})
        if unknown := next((name for name in sections if name not in KINDS), None):
            raise UserError(f"{where}: kinds: unknown kind {unknown!r}{nearest(unknown, KINDS)}")
        section = dict(sections.get(found.name, {}))
        if flat.get("drafter.kind") == "auto":
            section |= {k: v for k, v in derived.items() if k == "drafter.kind" or k not in flat}
        inserted.append((where, {key: value for key, value in flat.items() if key != "kinds"}))
        if section:
            inserted.append((where, section))
    return inserted


def _kind_of(init: str, recipe_drafter: Callable[[str], DrafterConfig | None]) -> DrafterKind:
    """The kind of `drafter.init`, or of the drafter that a shipped recipe will make there. Preflight reports one that is missing:
    until then it counts as a block drafter."""
    if found := kind_of_drafter(init):
        return found
    made = recipe_drafter(Path(init).parent.name)
    if made is None:
        return DrafterKind("block", "shared_kv")
    if made.kind == "block":
        return DrafterKind("block", made.context)
    return DrafterKind(made.kind, block_size=made.block_size)


def check_required(values: Mapping[str, tuple[Any, str]], name: str) -> None:
    """Raises UserError that names every value that the file of recipe `name` leaves to the user and that is missing."""
    lacking = [key for key, (value, _) in values.items() if value == REQUIRED]
    if lacking:
        given = " and ".join(f"{key}=…" for key in lacking)
        about = "; ".join(f"{key}: {keys()[key].doc.partition(';')[0]}" for key in lacking)
        raise UserError(f"command line: {name} needs {given} ({about})")


def shorten_to_run(recipe: Recipe, order: Mapping[str, int]) -> None:
    """Limit the warm-up to a third of the steps, and the first batch to the samples, where the length of the run was given after
    them: they were chosen for a longer run. A value that was given together with the length, or after it, stays.

    order: the number of the layer that gave a key; a default has none.
    """

    def precedes(key: str, length: str) -> bool:
        return order.get(key, -1) < order.get(length, -1)

    if precedes("trainer.warmup_steps", "trainer.max_steps"):
        recipe.trainer.warmup_steps = min(recipe.trainer.warmup_steps, recipe.trainer.max_steps // 3)
    if precedes("data.batch_size", "data.samples"):
        recipe.data.batch_size = min(recipe.data.batch_size, max(1, recipe.data.samples))
