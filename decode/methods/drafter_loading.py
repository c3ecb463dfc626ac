"""Trained drafters from disk, ready for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.standalone import DiffusionDrafter
from align.models.standalone_checkpoint import load_standalone, open_drafter
from align.target.loading import load_target, load_tokenizer
from align.target.model import Target
from decode.drafters.autoregressive import AutoregressiveDrafter, AutoregressiveWriter
from decode.drafters.base import Drafter
from decode.drafters.diffusion import DiffusionWriter
from decode.methods.drafter_spec import check_there, role_of
from decode.wrappers.translated import TranslatedDrafter
from decode.wrappers.vocabularies import VocabularyMap


def open_part(folder: str, role: str, target: Target) -> Any:
    """A trained drafter for `target`, of a kind of `decode.methods.registry.ROLES`.

    Raises:
        UserError: not found, or not of that kind.
    """
    if role == "autoregressive":
        return load_target(
            folder, target.dtype_name, str(target.device), target.fast, round_to_bf16=target.fast
        )
    check_there(folder)
    found = _read(folder, target, None, None)
    wanted = DiffusionDrafter if role == "diffusion" else BlockDrafter
    if not isinstance(found, wanted):
        raise UserError(f"--drafter {role}={folder}: that is no drafter of the kind {role}")
    if isinstance(found, DiffusionDrafter):
        _check_masks(found)
    return found


def _check_masks(drafter: DiffusionDrafter) -> None:
    if drafter.mask_id < 0:
        raise UserError(
            "the drafter undoes uniform noise and has no masks to draft from: absorbing ones have"
        )


def _read(
    spec: str | Path, target: Target, tokenizer: str | Path | None, draft_tokens: int | None
) -> Drafter | BlockDrafter | DiffusionDrafter:
    """A trained drafter from disk, ready for `target`; with a tokenizer of its own behind a translation."""
    causal = (
        open_part(str(spec), "autoregressive", target) if role_of(str(spec)) == "autoregressive" else None
    )
    more = () if draft_tokens is None else (draft_tokens,)
    if tokenizer is not None:
        own = load_tokenizer(tokenizer)
        inner = (
            AutoregressiveWriter(causal, *more) if causal else _writer(spec, target, len(own), draft_tokens)
        )
        return TranslatedDrafter(inner, VocabularyMap(own, target.tokenizer), draft_tokens)
    if causal:
        return AutoregressiveDrafter(causal, *more)
    drafter = open_drafter(spec, target)
    if isinstance(drafter, BlockDrafter):
        drafter = drafter.to(target.dtype)
        if target.fast:
            drafter.prepare_for_drafting()
    else:
        _fast(drafter, target)
    return drafter


def _fast(drafter: DiffusionDrafter, target: Target) -> None:
    """A draft is few rows, as a verified one is."""
    if target.fast:
        drafter.network.prepare_for_drafting()


def _writer(spec: str | Path, target: Target, tokens: int, draft_tokens: int | None) -> DiffusionWriter:
    drafter = load_standalone(spec, target, tokens)
    _fast(drafter, target)
    _check_masks(drafter)
    return DiffusionWriter(drafter, draft_tokens)
