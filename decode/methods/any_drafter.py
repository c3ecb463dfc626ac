"""A trained drafter of any kind, as a `Drafter` of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.standalone import DiffusionDrafter
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
