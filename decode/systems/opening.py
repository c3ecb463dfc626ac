"""Opens the drafters that methods need."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from decode.systems.drafter_folders import check_there
from decode.systems.parsing import Method, check_drafters, first_kind
from decode.systems.registry import ANY, AUTOREGRESSIVE, DIFFUSION
from specalign.common.checksums import check_checksums
from specalign.common.errors import UserError
from specalign.common.hub import local_path
from specalign.common.schema import JsonObject
from specalign.common.text import say
from specalign.folder.training_record import chat_note
from specalign.formats.standalone import load_standalone, open_drafter
from specalign.lm.loading import load_target, load_tokenizer
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.standalone import DiffusionDrafter


class ForeignDrafter(NamedTuple):
    """A standalone drafter with its own tokenizer."""

    network: DiffusionDrafter | Target
    tokenizer: Any


@dataclass
class OpenDrafters:
    """The target and the open drafters by kind; `ANY` is the first one unless it is among them.
    engine: what runs them, a name of `parsing.ENGINES`. paced: whether requests draft what pays
    off, instead of what the method says."""

    target: Target
    drafters: JsonObject = field(default_factory=dict)
    engine: str = "eager"
    paced: bool = False

    def __getitem__(self, kind: str) -> Any:
        if kind == ANY and ANY not in self.drafters:
            return next(iter(self.drafters.values()))
        return self.drafters[kind]


def open_drafters(
    methods: Sequence[Method],
    folders: Mapping[str, str],
    target: Target,
    tokenizer: str | os.PathLike[str] | None = None,
) -> OpenDrafters:
    """The drafters that these methods need, each opened once. folders: by kind; the first one given
    comes first. tokenizer: its own, where its vocabulary is not the target's. Raises UserError for
    a drafter that is not given, or can't be opened."""
    check_drafters(methods, folders)
    opened = OpenDrafters(target)
    for kind in dict.fromkeys(kind for method in methods for kind in method.needs):
        own = first_kind(folders, kind)
        if kind == ANY and tokenizer is not None:
            opened.drafters[ANY] = _open_foreign(folders[own], own, target, Path(tokenizer))
            continue
        if own not in opened.drafters:
            opened.drafters[own] = open_one(folders[own], own, target)
            if note := chat_note(folders[own], target.chat, target.tokenizer):
                say(note, error=True)
        opened.drafters[kind] = opened.drafters[own]
    return opened


def open_one(folder: str, kind: str, target: Target) -> BlockDrafter | DiffusionDrafter | Target:
    """A trained drafter of this kind. Raises UserError where it is missing or of another kind."""
    if kind == AUTOREGRESSIVE:
        check_checksums(local_path(folder))
        return load_target(
            folder, target.dtype_name, str(target.device), target.fast, round_to_bf16=target.fast,
            trust_remote_code=target.trust_remote_code,
        )  # fmt: skip
    check_there(folder)
    drafter = open_drafter(folder, target)
    if isinstance(drafter, DiffusionDrafter) != (kind == DIFFUSION):
        raise UserError(f"--drafter {kind}={folder}: not a drafter of kind {kind}")
    if isinstance(drafter, BlockDrafter):
        drafter = drafter.to(target.dtype)
    if target.fast:
        (drafter if isinstance(drafter, BlockDrafter) else drafter.network).prepare_for_drafting()
    return drafter


def _open_foreign(folder: str, kind: str, target: Target, tokenizer: Path) -> ForeignDrafter:
    """A standalone drafter with its own tokenizer. Raises UserError for a block drafter, or what
    does not exist."""
    vocabulary = load_tokenizer(tokenizer, target.trust_remote_code)
    if kind == AUTOREGRESSIVE:
        return ForeignDrafter(open_one(folder, kind, target), vocabulary)  # type: ignore[arg-type]
    check_there(folder)
    drafter = load_standalone(folder, target, vocab_size=len(vocabulary))
    if target.fast:
        drafter.network.prepare_for_drafting()
    return ForeignDrafter(drafter, vocabulary)
