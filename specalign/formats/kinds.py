"""Which network a folder holds, from its small files. No torch here: commands and recipes ask
before anything is loaded."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError
from specalign.common.hub import card_value, is_hub_id, local_path, model_folder
from specalign.common.schema import JsonObject, read_object

RECORD = "drafter.json"
"""What this project writes next to a standalone or autoregressive drafter's own config.json."""
EXPORT_RECORD = "export.json"
"""What an export of this project says of itself."""
ASSISTANT = "muse_glimmer_assistant"
"""The model type of transformers' own DFlash assistant."""
_DDIT = ("sedd", "mdlm", "ddit")
_CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class DrafterKind:
    """kind, context: values of `drafter.kind` and (block drafters) `drafter.context`. block_size:
    the tokens that a drafter trained here drafts; None where its folder does not say."""

    kind: str
    context: str | None = None
    block_size: int | None = None

    @property
    def name(self) -> str:
        """What tells recipes apart: the context of a block drafter, else the kind."""
        return self.context or self.kind


def kind_of_drafter(spec: str) -> DrafterKind | None:
    """The kind of the drafter in a folder or a hub id; None if it is unavailable or unknown. Raises
    UserError for a config that can't be read."""
    path = local_path(spec)
    if not path.is_dir() and is_hub_id(spec):
        with suppress(UserError):
            path = model_folder(spec, "drafter.init", ["config.json", RECORD])
    if not (path / "config.json").is_file():
        return None
    record = read_object(path / RECORD) if (path / RECORD).is_file() else {}
    return kind_of_config(read_object(path / "config.json"), record)


def kind_of_config(values: JsonObject, record: Mapping[str, Any]) -> DrafterKind | None:
    """The kind by config.json and, where there is one, drafter.json. None for an architecture that
    is no drafter's."""
    if is_block(values):
        shared = values.get("model_type") == "block_drafter" and values.get("context") != "taps"
        return DrafterKind("block", "shared_kv" if shared else "taps")
    size = record.get("block_size")
    size = size if type(size) is int else None
    if record.get("kind") == "autoregressive":
        return DrafterKind("autoregressive", block_size=size)
    if is_ddit(values):
        return DrafterKind("ddit", block_size=size)
    named = architectures_of(values)
    if any(name.endswith(_CAUSAL) for name in named) and not record:
        return DrafterKind("autoregressive")
    return DrafterKind("masked_lm", block_size=size) if named else None


def is_ddit(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of SEDD, MDLM or our own DDiT."""
    # SEDD's has no model_type
    return values.get("model_type") in _DDIT or ("model" in values and "tokens" in values)


def is_block(values: JsonObject) -> bool:
    """Whether a config.json is a block drafter's, this project's own or another engine's."""
    return values.get("model_type") == "block_drafter" or bool(layout_of(values))


def layout_of(values: JsonObject) -> str:
    """Which other engine's layout a folder with this config.json has, by the name of its module in
    this package; empty = none. Relatives that are not decoded here (DFlash 2, Domino) count as
    `dflash`, so that its reader names them."""
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
    """The names under `architectures` in a config.json; empty if that is not a list of names."""
    named = values.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def made_for(folder: Path, values: JsonObject) -> str:
    """The target that another engine's folder names: as a verifier, in the record of an export, or
    as its card's base model; empty = it names none."""
    name: Any = None
    with suppress(KeyError, TypeError):
        name = values["speculators_config"]["verifier"]["name_or_path"]
    if not isinstance(name, str) and (folder / EXPORT_RECORD).is_file():
        name = read_object(folder / EXPORT_RECORD).get("target")
    return name if isinstance(name, str) else card_value(folder, "base_model")
