"""The kind of a trained drafter, from the small files of its folder. No torch here: a recipe asks
before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specalign.common.errors import UserError
from specalign.common.hub import is_hub_id, local_path, model_folder
from specalign.common.schema import JsonObject, read_object
from specalign.formats.layouts import architectures_of, is_block

RECORD = "drafter.json"
"""What this project writes next to a standalone or autoregressive drafter's own config.json."""
_DDIT = ("sedd", "mdlm", "radd", "bd3lm", "ddit")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MASKED = ("SDARForCausalLM",)
"""Masked language models whose class is named like a causal one's."""


@dataclass(frozen=True)
class DrafterKind:
    """kind: a value of `drafter.kind`. context: of a block drafter, a value of `drafter.context`.
    block_size: of a drafter trained here, the tokens that it drafts; None where its folder does not
    say."""

    kind: str
    context: str | None = None
    block_size: int | None = None

    @property
    def name(self) -> str:
        """What tells recipes apart: the context of a block drafter, else the kind."""
        return self.context or self.kind


def kind_of_drafter(spec: str) -> DrafterKind | None:
    """The kind of the drafter in a folder or a hub id; None where nothing is there or nothing says
    it.

    Raises:
        UserError: a config that can't be read.
    """
    path = local_path(spec)
    if not path.is_dir():
        if not is_hub_id(spec):
            return None
        with suppress(UserError):
            path = model_folder(spec, "drafter.init", ["config.json", RECORD])
    if not (path / "config.json").is_file():
        return None
    record = read_object(path / RECORD) if (path / RECORD).is_file() else {}
    return kind_of_config(read_object(path / "config.json"), record)


def is_ddit(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of SEDD, MDLM, RADD, BD3-LM or our own DDiT."""
    # SEDD's and RADD's have no model_type
    return values.get("model_type") in _DDIT or ("model" in values and "tokens" in values)


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
    if any(name.endswith(_CAUSAL) and name not in _MASKED for name in named) and not record:
        return DrafterKind("autoregressive")
    return DrafterKind("masked_lm", block_size=size) if named else None
