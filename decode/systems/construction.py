"""Builds decoders from methods: opens drafters and combines a system's proposer, controller and
verifier with a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.engine.decoder import Decoder
from decode.proposers.adaptive import AdaptiveProposer
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.base import Proposer
from decode.proposers.block import BlockProposer
from decode.proposers.d2sd import D2SDProposer
from decode.proposers.diffusion import DiffusionProposer
from decode.proposers.diffuspec import DiffuSpecProposer
from decode.proposers.hierarchical import HierarchicalProposer
from decode.proposers.lookup import CopyingProposer, LookupProposer
from decode.proposers.overlapped import MergedProposer, OverlappedProposer
from decode.proposers.retrieval import Datastore, RetrievalProposer, read_corpus
from decode.proposers.specdiff2 import SpecDiff2Proposer
from decode.proposers.tolerator import ToleratorProposer
from decode.speculation.proposal import Siblings
from decode.speculation.verifiers import find
from decode.systems import registry
from decode.systems.drafter_folders import check_there
from decode.systems.parsing import Method, check_drafters, first_kind
from decode.systems.registry import ANY, AUTOREGRESSIVE, DIFFUSION, ORDERS, GivenDrafter, System
from specalign.common.checksums import check_checksums
from specalign.common.errors import UserError
from specalign.common.hub import local_path
from specalign.common.schema import JsonObject
from specalign.common.text import say
from specalign.folder.trained_chat import chat_note
from specalign.formats.standalone import open_drafter
from specalign.lm.loading import load_target, reload
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.standalone import DiffusionDrafter

Network = BlockDrafter | DiffusionDrafter | Target


@dataclass
class OpenDrafters:
    """The target and the open drafters by kind. `ANY` is among them where it is not the first
    one."""

    target: Target
    drafters: JsonObject = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Any:
        if kind == ANY and ANY not in self.drafters:
            return next(iter(self.drafters.values()))
        return self.drafters[kind]


def build(method: Method, drafters: OpenDrafters, draft_tokens: int | None = None) -> Decoder:
    """The method's decoder. `draft_tokens`: for a method that does not set them itself. Raises
    UserError for a missing drafter, or options that do not fit the drafters."""
    check_drafters([method], drafters.drafters)
    try:
        return assemble(method, drafters, draft_tokens)
    except UserError as error:
        raise UserError(f"method {method.name!r}: {error}") from None


def assemble(method: Method, drafters: OpenDrafters, draft_tokens: int | None = None) -> Decoder:
    """`build`, with errors that do not name the method."""
    target, asked = drafters.target, method.typed("draft_tokens") or draft_tokens
    if target.chains_only and method.branches:
        why = f"target {target.spec!r} {target.why_chains_only}"
        raise UserError(f"{why}, so drafts can't branch")
    if draft_tokens is not None:
        method = method.with_defaults({"draft_tokens": draft_tokens})
    system = method.system
    if not isinstance(system, registry.DraftingSystem):
        return Decoder(target)
    proposer = _make_proposer(system, drafters)
    longest = proposer.draft_tokens
    if longest < (method.typed("draft_tokens") or 0):
        raise UserError(f"this drafter drafts at most {longest} tokens")
    if system.copying:
        proposer = CopyingProposer(proposer, *([asked, asked] if asked else []))
    return Decoder(target, proposer, system.verifier_name)


_CLASSES: dict[type[System], Callable[..., Proposer]] = {
    registry.Lookup: LookupProposer,
    registry.Autoregressive: AutoregressiveProposer,
    registry.BlockSystem: BlockProposer,
    registry.BlockTree: BlockProposer,
    registry.SpecDiff: DiffusionProposer,
    registry.SpecDiff2: SpecDiff2Proposer,
    registry.D2SD: D2SDProposer,
    registry.Tolerator: ToleratorProposer,
    registry.SpecDec: DiffusionProposer,
}
"""The proposers that take the system's drafters, and its own options by name."""


def _make_proposer(system: System, drafters: OpenDrafters) -> Proposer:
    target = drafters.target
    match system:
        case GivenDrafter():
            return make_given(system, drafters)
        case registry.Retrieval():
            return _make_retrieval(system, target)
        case registry.DiffuSpec(corpus=path, draft_tokens=tokens):
            corpus = () if path is None else read_corpus(path, target)
            return DiffuSpecProposer(drafters[DIFFUSION], tokens, corpus)
        case registry.Hierarchical(draft_tokens=tokens, inner=name):
            copier = LookupProposer() if name == "lookup" else RetrievalProposer()
            return HierarchicalProposer(drafters[AUTOREGRESSIVE], copier, tokens)
        case registry.Double(draft_tokens=tokens, corpus=path):
            first = _make_retrieval(registry.Retrieval(corpus=path), target)
            second = _make_retrieval(registry.Retrieval(corpus=path, draft_tokens=tokens), target)
            model = HierarchicalProposer(drafters[AUTOREGRESSIVE], first, tokens + 1)
            return MergedProposer(OverlappedProposer(model), second)
        case registry.Duo(draft_tokens=tokens, device=device, controller=controller):
            small = drafters[AUTOREGRESSIVE]
            if device not in (None, str(small.device)):
                small = reload(small, device)
            ahead = OverlappedProposer(AutoregressiveProposer(small, tokens + 1))
            return AdaptiveProposer(ahead) if controller == "cost" else ahead
    options = system.own_options if isinstance(system, registry.DraftingSystem) else {}
    return _CLASSES[type(system)](*(drafters[kind] for kind in system.needs), **options)


def _make_retrieval(system: registry.Retrieval, target: Target) -> Proposer:
    path = system.corpus
    store = None if path is None else Datastore(read_corpus(path, target))
    return RetrievalProposer(system.draft_tokens, system.shortest, system.tree_nodes, store)


def make_given(system: GivenDrafter, drafters: OpenDrafters) -> Proposer:
    """A proposer from a drafter of any kind. For a verifier that is exact for drawn drafts only,
    drafts are drawn: chains, or trees with siblings that it accepts. Raises UserError for steps, an
    order or trees for a drafter that has none."""
    drafter, nodes, tokens = drafters[ANY], system.tree_nodes, system.draft_tokens
    if nodes is None and drafters.target.chains_only:
        nodes = 0
    siblings: Siblings | None = None
    if system.verifier_name != "auto" and "point" not in find(system.verifier_name).laws:
        nodes = nodes or 0
        accepted = find(system.verifier_name).siblings
        siblings = next((kind for kind in ("without_replacement", "iid") if kind in accepted), None)
    if isinstance(drafter, DiffusionDrafter):
        return DiffusionProposer(drafter, tokens, system.steps, system.order, nodes or 0, siblings)
    check_options(system, isinstance(drafter, BlockDrafter))
    if isinstance(drafter, BlockDrafter):
        return BlockProposer(drafter, tokens, nodes, siblings)
    if isinstance(drafter, Target):
        return AutoregressiveProposer(drafter, *([tokens] if tokens else []))
    proposer: Proposer = drafter
    return proposer


def check_options(system: GivenDrafter, trees: bool) -> None:
    """Raises UserError for options that only other drafters have."""
    if system.steps != 1 or system.order != ORDERS[0]:
        raise UserError("steps and order apply only to standalone diffusion drafters")
    if system.tree_nodes and not trees:
        raise UserError("tree_nodes applies only to block and standalone diffusion drafters")


def open_drafters(
    methods: Sequence[Method], folders: Mapping[str, str], target: Target
) -> OpenDrafters:
    """The drafters that these methods need, each opened once. folders: by kind; the first one given
    comes first. Raises UserError for a drafter that is not given, or can't be opened."""
    check_drafters(methods, folders)
    opened = OpenDrafters(target)
    for kind in dict.fromkeys(kind for method in methods for kind in method.needs):
        own = first_kind(folders, kind)
        if own not in opened.drafters:
            opened.drafters[own] = open_one(folders[own], own, target)
            note = chat_note(folders[own], target.chat, target.tokenizer)
            if note:
                say(note, error=True)
        opened.drafters[kind] = opened.drafters[own]
    return opened


def open_one(folder: str, kind: str, target: Target) -> Network:
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
