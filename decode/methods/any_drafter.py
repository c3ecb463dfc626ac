"""A trained drafter of any kind: opened from disk, and as a `Drafter` of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.common.checksums import check_checksums
from align.common.errors import UserError
from align.common.hub import local_path
from align.models.block import BlockDrafter
from align.models.checkpoints.standalone import load_standalone, open_drafter
from align.models.standalone import DiffusionDrafter
from align.target.loading import load_target, load_tokenizer
from align.target.model import Target
from decode.drafters.autoregressive import AutoregressiveDrafter, AutoregressiveWriter
from decode.drafters.base import Drafter
from decode.drafters.block import BlockProposer
from decode.drafters.diffusion import ORDERS, DiffusionProposer, DiffusionWriter
from decode.speculation.proposal import Siblings
from decode.speculation.verifiers import find
from decode.wrappers.translated import TranslatedDrafter
from decode.wrappers.vocabularies import VocabularyMap

NO_STEPS = "steps and order are a standalone drafter's (DDiT, masked language model): this one has none"
NO_TREES = "tree_nodes is a block drafter's or a standalone diffusion drafter's: this one drafts chains (tree_nodes=0)"


@dataclass(frozen=True)
class ForeignDrafter:
    """A standalone drafter with a vocabulary of its own, and the map between the two vocabularies."""

    network: DiffusionDrafter | Target
    vocabulary: VocabularyMap


def check_masks(drafter: DiffusionDrafter) -> None:
    """Raises UserError for a drafter without a mask token."""
    if drafter.mask_id < 0:
        raise UserError(
            "the drafter undoes uniform noise and has no masks to draft from: absorbing ones have"
        )


def any_drafter(
    drafter: Any, target: Target, gamma: int | None, nodes: int | None, steps: int, order: str, verifier: str
) -> Drafter:
    """A `Drafter` of the engine from a trained drafter of any kind, or from one that is a `Drafter` already.

    For a verifier that is exact for drawn drafts alone, drafts are drawn: chains, or trees with siblings that it accepts.

    Raises:
        UserError: a number out of its range; steps, an order or trees for a drafter that has none.
    """
    if nodes is None and target.chains_only:
        nodes = 0
    siblings: Siblings | None = None
    if verifier != "auto" and "point" not in find(verifier).laws:
        nodes = nodes or 0
        fitting = find(verifier).siblings
        siblings = next((x for x in ("without_replacement", "iid") if x in fitting), None)
    if isinstance(drafter, DiffusionDrafter):
        check_masks(drafter)
        return DiffusionProposer(drafter, gamma, steps, order, False, nodes or 0, siblings)
    if steps != 1 or order != ORDERS[0]:
        raise UserError(NO_STEPS)
    if isinstance(drafter, BlockDrafter):
        return BlockProposer(drafter, gamma, nodes, siblings)
    if nodes:
        raise UserError(NO_TREES)
    more = () if gamma is None else (gamma,)
    if isinstance(drafter, ForeignDrafter):
        writer: Any = AutoregressiveWriter if isinstance(drafter.network, Target) else DiffusionWriter
        return TranslatedDrafter(writer(drafter.network, *more), drafter.vocabulary, gamma)
    if isinstance(drafter, Target):
        return AutoregressiveDrafter(drafter, *more)
    return drafter


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
