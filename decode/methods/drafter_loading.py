"""Trained drafters from disk, ready for a target."""

from __future__ import annotations

from pathlib import Path

from align.common.checksums import check_checksums
from align.common.errors import UserError
from align.common.hub import local_path
from align.models.block import BlockDrafter
from align.models.checkpoints.standalone import load_standalone, open_drafter
from align.models.standalone import DiffusionDrafter
from align.target.loading import load_target, load_tokenizer
from align.target.model import Target
from decode.methods.any_drafter import ForeignDrafter, check_masks
from decode.methods.drafter_spec import check_there
from decode.wrappers.vocabularies import VocabularyMap


def open_part(folder: str, role: str, target: Target) -> BlockDrafter | DiffusionDrafter | Target:
    """A trained drafter for `target`, of a kind of `decode.methods.registry.ROLES`.

    Raises:
        UserError: not found, or not of that kind.
    """
    if role == "autoregressive":
        check_checksums(local_path(folder))
        return load_target(
            folder,
            target.dtype_name,
            str(target.device),
            target.fast,
            round_to_bf16=target.fast,
            trust_remote_code=target.trust_remote_code,
        )
    check_there(folder)
    found = open_drafter(folder, target)
    wanted = DiffusionDrafter if role == "diffusion" else BlockDrafter
    if not isinstance(found, wanted):
        raise UserError(f"--drafter {role}={folder}: that is no drafter of the kind {role}")
    if isinstance(found, DiffusionDrafter):
        return _ready(found, target)
    found = found.to(target.dtype)
    if target.fast:
        found.prepare_for_drafting()
    return found


def open_foreign(folder: str, role: str, target: Target, tokenizer: str | Path) -> ForeignDrafter:
    """A standalone drafter with a tokenizer of its own.

    Raises:
        UserError: the drafter or the tokenizer is not found, or the drafter is of another kind.
    """
    network = open_part(folder, role, target) if role == "autoregressive" else None
    own = load_tokenizer(tokenizer, target.trust_remote_code)
    if network is None:
        network = _ready(load_standalone(folder, target, len(own)), target)
    assert not isinstance(network, BlockDrafter)
    return ForeignDrafter(network, VocabularyMap(own, target.tokenizer))


def _ready(drafter: DiffusionDrafter, target: Target) -> DiffusionDrafter:
    check_masks(drafter)
    if target.fast:  # a draft is few rows, as a verified one is
        drafter.network.prepare_for_drafting()
    return drafter
