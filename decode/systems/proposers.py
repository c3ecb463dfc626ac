"""The proposer of each system, made from its options and the drafters that are open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.standalone import DiffusionDrafter
from align.target.loading import reload
from align.target.model import Target
from decode.drafters.autoregressive import AutoregressiveDrafter, AutoregressiveWriter
from decode.drafters.base import Drafter
from decode.drafters.block import BlockProposer
from decode.drafters.corpus import read_corpus
from decode.drafters.d2sd import D2SDDrafter
from decode.drafters.diffusion import DiffusionProposer, DiffusionWriter
from decode.drafters.diffuspec import DiffuSpecDrafter
from decode.drafters.hierarchical import HierarchicalDrafter
from decode.drafters.lookup import LookupDrafter
from decode.drafters.retrieval import RetrievalDrafter
from decode.drafters.specdiff2 import SpecDiff2Drafter
from decode.drafters.suffix_automaton import Datastore
from decode.drafters.tolerator import ToleratorDrafter
from decode.speculation.proposal import Siblings
from decode.speculation.verifiers import find
from decode.systems import registry
from decode.systems.registry import ANY, AUTOREGRESSIVE, BLOCK, DIFFUSION, ORDERS, VARIABLE_PREFIX
from decode.wrappers.merged import MergedDrafter
from decode.wrappers.overlapped import OverlappedDrafter
from decode.wrappers.translated import TranslatedDrafter
from decode.wrappers.vocabularies import VocabularyMap

NO_STEPS = "steps and order belong to standalone drafters (DDiT, masked language model)"
NO_TREES = (
    "tree_nodes belongs to block and standalone diffusion drafters; this one drafts chains (tree_nodes=0)"
)


@dataclass(frozen=True)
class ForeignDrafter:
    """A standalone drafter with its own vocabulary, and the map between the two vocabularies."""

    network: DiffusionDrafter | Target
    vocabulary: VocabularyMap


@dataclass
class OpenDrafters:
    """The target and the open drafters by kind. `ANY` is among them where it is not the first one."""

    target: Target
    drafters: dict[str, Any] = field(default_factory=dict)

    @property
    def any(self) -> Any:
        return self.drafters[ANY if ANY in self.drafters else next(iter(self.drafters))]

    @property
    def block(self) -> BlockDrafter:
        return self.drafters[BLOCK]

    @property
    def variable_prefix(self) -> BlockDrafter:
        return self.drafters[VARIABLE_PREFIX]

    @property
    def diffusion(self) -> DiffusionDrafter:
        return self.drafters[DIFFUSION]

    @property
    def autoregressive(self) -> Target:
        return self.drafters[AUTOREGRESSIVE]


def check_masks(drafter: DiffusionDrafter) -> None:
    """Raises UserError for a drafter without a mask token."""
    if drafter.mask_id < 0:
        raise UserError("this drafter was trained with uniform noise; decoding needs graph=absorbing")


def make_given(options: registry.GivenDrafter, drafters: OpenDrafters) -> Drafter:
    """For a verifier that is exact for drawn drafts only, drafts are drawn: chains, or trees with siblings that it accepts.

    Raises:
        UserError: steps, an order or trees for a drafter that has none.
    """
    drafter, target = drafters.any, drafters.target
    nodes, tokens = options.tree_nodes, options.draft_tokens
    if nodes is None and target.chains_only:
        nodes = 0
    siblings: Siblings | None = None
    if options.chosen_verifier != "auto" and "point" not in find(options.chosen_verifier).laws:
        nodes = nodes or 0
        accepted = find(options.chosen_verifier).siblings
        siblings = next((kind for kind in ("without_replacement", "iid") if kind in accepted), None)
    if isinstance(drafter, DiffusionDrafter):
        check_masks(drafter)
        return DiffusionProposer(
            drafter, tokens, options.steps, options.order, tree_nodes=nodes or 0, siblings=siblings
        )
    if options.steps != 1 or options.order != ORDERS[0]:
        raise UserError(NO_STEPS)
    if isinstance(drafter, BlockDrafter):
        return BlockProposer(drafter, tokens, nodes, siblings)
    if nodes:
        raise UserError(NO_TREES)
    length = {} if tokens is None else {"draft_tokens": tokens}
    if isinstance(drafter, ForeignDrafter):
        writer: Any = AutoregressiveWriter if isinstance(drafter.network, Target) else DiffusionWriter
        return TranslatedDrafter(writer(drafter.network, **length), drafter.vocabulary, tokens)
    if isinstance(drafter, Target):
        return AutoregressiveDrafter(drafter, **length)
    return drafter


def make_lookup(options: registry.Lookup, drafters: OpenDrafters) -> Drafter:
    return LookupDrafter(options.draft_tokens, options.longest)


def make_retrieval(options: registry.Retrieval, drafters: OpenDrafters) -> Drafter:
    store = None if options.corpus is None else Datastore(read_corpus(options.corpus, drafters.target))
    return RetrievalDrafter(options.draft_tokens, options.shortest, options.tree_nodes, store)


def make_autoregressive(options: registry.Autoregressive, drafters: OpenDrafters) -> Drafter:
    return AutoregressiveDrafter(drafters.autoregressive, options.draft_tokens)


def make_block(options: registry.Block, drafters: OpenDrafters) -> Drafter:
    return BlockProposer(
        drafters.block, options.draft_tokens, 0, confidence=options.confidence, passes=options.passes
    )


def make_block_tree(options: registry.BlockTree, drafters: OpenDrafters) -> Drafter:
    return BlockProposer(
        drafters.block,
        options.draft_tokens,
        options.tree_nodes,
        passes=options.passes,
        by_cost=options.by_cost,
    )


def make_specdiff(options: registry.SpecDiff, drafters: OpenDrafters) -> Drafter:
    return DiffusionProposer(
        drafters.diffusion,
        options.draft_tokens,
        options.steps,
        options.order,
        options.hot_start,
        options.tree_nodes,
    )


def make_specdiff2(options: registry.SpecDiff2, drafters: OpenDrafters) -> Drafter:
    return SpecDiff2Drafter(
        drafters.diffusion,
        options.draft_tokens,
        options.candidates,
        options.draft_temperature,
        options.keep_q,
    )


def make_diffuspec(options: registry.DiffuSpec, drafters: OpenDrafters) -> Drafter:
    return DiffuSpecDrafter(
        drafters.diffusion,
        options.draft_tokens,
        path_search=options.path_search,
        adaptive_length=options.adaptive_length,
        corpus=() if options.corpus is None else read_corpus(options.corpus, drafters.target),
    )


def make_d2sd(options: registry.D2SD, drafters: OpenDrafters) -> Drafter:
    return D2SDDrafter(
        drafters.block, drafters.variable_prefix, options.boundaries, options.draft_tokens, options.keep_q
    )


def make_hierarchical(options: registry.Hierarchical, drafters: OpenDrafters) -> Drafter:
    inner: Drafter
    if options.inner == "diffusion":
        inner = make_specdiff(registry.SpecDiff(), drafters)
    elif options.inner == "lookup":
        inner = make_lookup(registry.Lookup(), drafters)
    else:
        inner = make_retrieval(registry.Retrieval(), drafters)
    return HierarchicalDrafter(drafters.autoregressive, inner, options.draft_tokens)


def make_double(options: registry.Double, drafters: OpenDrafters) -> Drafter:
    corpus, tokens = options.corpus, options.draft_tokens
    retrieval = make_retrieval(registry.Retrieval(corpus=corpus), drafters)
    ahead = OverlappedDrafter(HierarchicalDrafter(drafters.autoregressive, retrieval, tokens + 1))
    second = make_retrieval(registry.Retrieval(corpus=corpus, draft_tokens=tokens), drafters)
    return MergedDrafter(ahead, second)


def make_duo(options: registry.Duo, drafters: OpenDrafters) -> Drafter:
    model = drafters.autoregressive
    if options.device is not None and options.device != str(model.device):
        model = reload(model, options.device)
    return OverlappedDrafter(AutoregressiveDrafter(model, options.draft_tokens + 1))


def make_tolerator(options: registry.Tolerator, drafters: OpenDrafters) -> Drafter:
    return ToleratorDrafter(drafters.diffusion, options.draft_tokens, options.steps, options.rounds)


def make_specdec(options: registry.SpecDec, drafters: OpenDrafters) -> Drafter:
    return DiffusionProposer(drafters.diffusion, options.draft_tokens)


MAKERS: dict[type[registry.System], Callable[..., Drafter]] = {
    registry.GivenDrafter: make_given,
    registry.Combined: make_given,
    registry.Lookup: make_lookup,
    registry.Retrieval: make_retrieval,
    registry.Autoregressive: make_autoregressive,
    registry.Block: make_block,
    registry.BlockTree: make_block_tree,
    registry.SpecDiff: make_specdiff,
    registry.SpecDiff2: make_specdiff2,
    registry.DiffuSpec: make_diffuspec,
    registry.D2SD: make_d2sd,
    registry.Hierarchical: make_hierarchical,
    registry.Double: make_double,
    registry.Duo: make_duo,
    registry.Tolerator: make_tolerator,
    registry.SpecDec: make_specdec,
}
