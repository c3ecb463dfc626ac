"""Which engine's layout a block drafter's config.json is of. No torch here: commands ask before
anything is loaded.

| layout | recognised by | written by |
|---|---|---|
| `dflash` | `architectures` of DFlash, or `dflash_config` | DFlash (arXiv 2602.06036), SpecForge |
| `dspark` | `architectures` of DSpark, or DFlash's with `markov_rank` | DSpark (arXiv 2607.05147), SpecForge |
| `speculators` | `speculators_model_type` | the speculators package |
| `transformers` | `model_type` | transformers' own assistant |
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specalign.common.hub import card_value
from specalign.common.schema import JsonObject, read_object

"""The object in a config.json."""
ASSISTANT = "muse_glimmer_assistant"
"""The model type of transformers' own DFlash assistant."""
RECORD = "export.json"
"""What an export of this project says of itself."""


def layout_of(values: JsonObject) -> str:
    """The layout of a folder with this config.json, one of the table; empty = none of them.
    Relatives that are not decoded here (DFlash 2, Domino) are of `dflash` too, so that what reads
    it says what they are."""
    if "speculators_model_type" in values:
        return "speculators"
    if values.get("model_type") == ASSISTANT:
        return "transformers"
    names, nested = str(values.get("architectures")), values.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    if "DSpark" in names or nested.get("projector_type") == "dspark":
        return "dspark"
    if "DFlash" in names or "Domino" in names or "dflash_config" in values:
        return "dspark" if values.get("markov_rank") or nested.get("markov_rank") else "dflash"
    return ""


def architectures_of(values: Mapping[str, Any]) -> list[str]:
    """The names under `architectures` in a config.json; none where that is no list of them."""
    named = values.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def is_block(values: JsonObject) -> bool:
    """Whether a config.json is a block drafter's, this project's own or another engine's."""
    return values.get("model_type") == "block_drafter" or bool(layout_of(values))


def made_for(folder: Path, values: JsonObject) -> str:
    """The target that another engine's folder names: as a verifier, in the record of an export, or
    as its card's base model; empty = it names none."""
    said: Any = values.get("speculators_config")
    said = said.get("verifier") if isinstance(said, dict) else None
    said = said.get("name_or_path") if isinstance(said, dict) else None
    if not isinstance(said, str) and (folder / RECORD).is_file():
        said = read_object(folder / RECORD).get("target")
    if not isinstance(said, str):
        said = card_value(folder, "base_model")
    return said if isinstance(said, str) else ""
