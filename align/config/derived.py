"""Values that follow from other keys: the section for the drafter's kind, and sizes for a shorter
run. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from align.config.data import DataConfig
from align.config.drafter import DrafterConfig
from align.config.recipe import Values, keys
from align.config.trainer import TrainerConfig
from specalign.common.errors import UserError, nearest
from specalign.common.schema import JsonObject
from specalign.formats.kinds import DrafterKind, kind_of_drafter

Sections = dict[str, JsonObject]
"""The values of each section."""
Layer = tuple[str, Values]
"""A source of values, a file's name or the command line, and its values by dotted key."""
KINDS = ("shared_kv", "taps", "masked_lm", "ddit", "autoregressive")
"""Sections under `kinds` in a recipe's file: the contexts of block drafters, and the other
kinds."""
REQUIRED = "???"
"""In a recipe's file: the user must give this value."""


class Value(NamedTuple):
    """A value, its source, and the number of its layer."""

    value: object
    where: str
    layer: int


def insert_kind(
    layers: list[Layer], load_drafter: Callable[[str], DrafterConfig | None]
) -> list[Layer]:
    """Replace each file's `kinds` by its section for this drafter, directly after that file.

    `drafter.kind: auto` becomes the kind of `drafter.init`. Raises UserError: a section for an
    unknown kind, or `drafter.kind: auto` without drafter.init.

    Args:
        layers: bases first, the command line last.
        load_drafter: the drafter section of a shipped recipe by name, or None.
    """
    given = {key: value for _, flat in layers for key, value in flat.items()}
    kind = given.get("drafter.kind", "block")
    derived: Values = {}
    if kind == "auto":
        init = given.get("drafter.init")
        if not isinstance(init, str):
            raise UserError("drafter.kind=auto is the kind of drafter.init: name a drafter there")
        found = _find_kind(init, load_drafter)
        derived = {"drafter.kind": found.kind}
        if found.block_size is not None:
            derived["drafter.block_size"] = found.block_size
    else:
        context = str(given.get("drafter.context", "shared_kv")) if kind == "block" else None
        found = DrafterKind(str(kind), context)
    inserted: list[Layer] = []
    for where, flat in layers:
        sections = flat.get("kinds", {})
        assert isinstance(sections, dict)
        for name in sections:
            if name not in KINDS:
                raise UserError(f"{where}: kinds: unknown kind {name!r}{nearest(name, KINDS)}")
        section = dict(sections.get(found.name, {}))
        if flat.get("drafter.kind") == "auto":
            section |= {k: v for k, v in derived.items() if k == "drafter.kind" or k not in flat}
        inserted.append((where, {key: value for key, value in flat.items() if key != "kinds"}))
        if section:
            inserted.append((where, section))
    return inserted


def _find_kind(init: str, load_drafter: Callable[[str], DrafterConfig | None]) -> DrafterKind:
    """The kind of `drafter.init`, or of the drafter that a shipped recipe will save there. A
    missing one, which preflight reports, counts as a block drafter."""
    found = kind_of_drafter(init)
    if found:
        return found
    planned = load_drafter(Path(init).parent.name)
    if planned is None:
        return DrafterKind("block", "shared_kv")
    if planned.kind == "block":
        return DrafterKind("block", planned.context)
    return DrafterKind(planned.kind, block_size=planned.block_size)


def check_required(values: Mapping[str, Value], name: str) -> None:
    """Raises UserError that names all values that recipe `name` requires and that are missing."""
    missing = [key for key, given in values.items() if given.value == REQUIRED]
    if missing:
        arguments = " and ".join(f"{key}=…" for key in missing)
        docs = "; ".join(f"{key}: {keys()[key].doc.partition(';')[0]}" for key in missing)
        raise UserError(f"command line: {name} needs {arguments} ({docs})")


def shorten_to_run(sections: Sections, values: Mapping[str, Value]) -> None:
    """Limit the warm-up to a third of the steps, and the batch to the samples, where a later layer
    changed the run's length."""

    def precedes(key: str, length: str) -> bool:
        layer = values[key].layer if key in values else -1
        return length in values and layer < values[length].layer

    trainer, data = sections["trainer"], sections["data"]
    if precedes("trainer.warmup_steps", "trainer.max_steps"):
        warmup = trainer.get("warmup_steps", TrainerConfig.warmup_steps)
        trainer["warmup_steps"] = min(warmup, trainer["max_steps"] // 3)
    if precedes("data.batch_size", "data.samples"):
        batch_size = data.get("batch_size", DataConfig.batch_size)
        data["batch_size"] = min(batch_size, max(1, data["samples"]))
