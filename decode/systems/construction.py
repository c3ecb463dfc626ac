"""`decode.load`, and decoders from methods: opens a target and its drafters and combines a system's
proposer, controller and verifier."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

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
from decode.proposers.retrieval import RetrievalProposer, index_corpus, read_corpus
from decode.proposers.specdiff2 import SpecDiff2Proposer
from decode.proposers.tolerator import ToleratorProposer
from decode.proposers.translated import TranslatedProposer
from decode.speculation.proposal import Siblings
from decode.speculation.verifiers import find
from decode.systems import drafter_folders, registry
from decode.systems.drafter_folders import AUTO, NO_FOLDERS, check_there
from decode.systems.opening import ForeignDrafter, OpenDrafters, open_drafters
from decode.systems.parsing import Method, check_drafters, format_method, read_method
from decode.systems.registry import ANY, AUTOREGRESSIVE, DIFFUSION, ORDERS, GivenDrafter
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.lm.loading import load_target, reload
from specalign.lm.model import Target
from specalign.lm.names import DEFAULT_TARGET
from specalign.models.block import BlockDrafter
from specalign.models.standalone import DiffusionDrafter

AnyDrafter = str | os.PathLike[str] | Proposer | BlockDrafter | DiffusionDrafter | Target


def load(
    target: str | os.PathLike[str] | Target = DEFAULT_TARGET,
    drafter: AnyDrafter | None = AUTO,
    verifier: str = "auto",
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    draft_tokens: int | None = None,
    tree_nodes: int | None = None,
    copying: bool | None = None,
    steps: int = 1,
    order: str = ORDERS[0],
    drafter_tokenizer: str | os.PathLike[str] | None = None,
    method: str | None = None,
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    system: str | None = None,
) -> Decoder:
    """Load a target and its drafter as a decoder.

    Args:
        target: hub id, folder, GGUF file or `debug`; or a loaded target.
        drafter: `auto` (the shipped drafter for the default target, `lookup` for others), a trained
            drafter's folder or hub id, `lookup`, None or `none` (plain decoding), or a loaded
            drafter.
        verifier: see `Decoder`.
        dtype, device: of the target: float32, bfloat16 or float16; cpu, cuda or cuda:N.
        draft_tokens: maximum number of tokens to draft ahead; default: the drafter's block size.
        tree_nodes: of block drafters: size of the draft tree; 0 = a chain. Default: by temperature.
        copying: copy where the text repeats itself. Default: with a drafter and no `method`.
        steps, order: for standalone drafters: number of denoising passes, and the unmasking order.
        drafter_tokenizer: of a standalone drafter whose vocabulary is not the target's: the folder
            or hub id of its tokenizer.
        method: a system with its options, such as `specdiff:steps=4`. `drafter` then lists its
            drafters, as FOLDER or KIND=FOLDER,….
        trust_remote_code: run Python code shipped with the models.
        template_kwargs, system: variables of the target's chat template, and the system prompt for
            conversations without one.

    Raises:
        UserError: a file or model can't be found, read or combined, or an option is invalid.
    """
    if not isinstance(target, str | os.PathLike | Target):
        raise UserError(f"target={target!r:.40}: must be a hub id, a folder or a GGUF file")
    spec = target.spec if isinstance(target, Target) else os.fspath(target)
    drafter = _choose_drafter(drafter, spec, method)
    trained = drafter is not None and drafter not in NO_FOLDERS
    options = GivenDrafter(
        verifier=None if verifier == "auto" else verifier,
        tree_nodes=tree_nodes,
        steps=steps,
        order=order,
        copying=trained and method is None if copying is None else copying,
        draft_tokens=draft_tokens,
    )
    chosen, folders = _choose_method(method, drafter, options)
    if drafter_tokenizer is not None and not (folders and ANY in chosen.needs):
        raise UserError("drafter_tokenizer applies only to a drafter's folder")
    if not isinstance(target, Target):
        target = load_target(
            spec, str(dtype).removeprefix("torch."), str(device), decoding=True,
            trust_remote_code=trust_remote_code, template_kwargs=template_kwargs, system=system,
        )  # fmt: skip
    elif template_kwargs or system is not None:
        raise UserError("pass template_kwargs and system to load_target: the target is loaded")
    if drafter is None or isinstance(drafter, str):
        opened = open_drafters([chosen], folders, target, drafter_tokenizer)
    else:
        opened = OpenDrafters(target, {ANY: drafter})
    return (assemble if method is None else build)(chosen, opened, draft_tokens)


def _choose_drafter(
    drafter: AnyDrafter | None, spec: str, method: str | None
) -> str | Proposer | BlockDrafter | DiffusionDrafter | Target | None:
    """The drafter that `auto` stands for, with a note if there is none; a path as text."""
    if drafter == AUTO:
        drafter = drafter_folders.shipped_for(spec)
        if drafter is None and method is None:
            drafter = registry.LOOKUP
            say(f"note: no drafter is shipped for {spec}; drafting with prompt lookup", error=True)
    return os.fspath(drafter) if isinstance(drafter, os.PathLike) else drafter


def _choose_method(
    name: str | None, drafter: object, options: GivenDrafter
) -> tuple[Method, dict[str, str]]:
    """The method with this name, or the one that decodes with this drafter, and the folders of its
    drafters by kind."""
    folders: dict[str, str] = {}
    given = options.given
    if name is not None:
        method = read_method(name)
        if given and ANY not in method.needs:
            typed = format_method(name, {key: str(value).lower() for key, value in given.items()})
            raise UserError(f"method={name!r} takes its options after colons: method={typed!r}")
        if drafter is None or isinstance(drafter, str):
            named = drafter_folders.read_drafters(drafter)
            folders = drafter_folders.drafters_by_kind(named)
        check_drafters([method], folders or ({} if drafter is None else {ANY: drafter}))
    elif drafter is None or drafter in NO_FOLDERS:
        check_options(options, drafter)
        method = read_method(registry.LOOKUP if drafter == registry.LOOKUP else registry.PLAIN)
    else:
        method = read_method(registry.DRAFTER)
        if isinstance(drafter, str):
            check_there(drafter)
            folders = {drafter_folders.kind_of(drafter): drafter}
    given.pop("draft_tokens", None)  # at most: a drafter may draft fewer
    return method.with_defaults(given), folders


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
        raise UserError(f"target {target.spec!r} {target.why_chains_only}, so drafts can't branch")
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


# the proposers that take the system's drafters, and its own options by name
_CLASSES: dict[type[registry.System], Callable[..., Proposer]] = {
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


def _make_proposer(system: registry.DraftingSystem, drafters: OpenDrafters) -> Proposer:
    target = drafters.target
    match system:
        case GivenDrafter():
            return make_given(system, drafters)
        case registry.Retrieval(draft_tokens=tokens, corpus=path):
            store = index_corpus(path, target)
            return RetrievalProposer(tokens, system.shortest, system.tree_nodes, store)
        case registry.DiffuSpec(corpus=path, draft_tokens=tokens):
            corpus = () if path is None else read_corpus(path, target)
            return DiffuSpecProposer(drafters[DIFFUSION], tokens, corpus)
        case registry.Hierarchical(draft_tokens=tokens, inner=name):
            inner = LookupProposer() if name == "lookup" else RetrievalProposer()
            return HierarchicalProposer(drafters[AUTOREGRESSIVE], inner, tokens)
        case registry.Double(draft_tokens=tokens, corpus=path):
            store = index_corpus(path, target)
            copier = RetrievalProposer(datastore=store)
            model = HierarchicalProposer(drafters[AUTOREGRESSIVE], copier, tokens + 1)
            second = RetrievalProposer(tokens, datastore=store)
            return MergedProposer(OverlappedProposer(model), second)
        case registry.Duo(draft_tokens=tokens, device=device, controller=controller):
            small = drafters[AUTOREGRESSIVE]
            if device not in (None, str(small.device)):
                small = reload(small, device)
            ahead = OverlappedProposer(AutoregressiveProposer(small, tokens + 1))
            return AdaptiveProposer(ahead) if controller == "cost" else ahead
    return _CLASSES[type(system)](*(drafters[kind] for kind in system.needs), **system.own_options)


def make_given(system: GivenDrafter, drafters: OpenDrafters) -> Proposer:
    """A proposer from a drafter of any kind. For a verifier that is exact for drawn drafts only,
    drafts are drawn: chains, or trees with siblings that it accepts."""
    drafter, nodes, tokens = drafters[ANY], system.tree_nodes, system.draft_tokens
    if nodes is None and drafters.target.chains_only:
        nodes = 0
    siblings: Siblings | None = None
    verifier = None if system.verifier_name == "auto" else find(system.verifier_name)
    if verifier is not None and "point" not in verifier.laws:
        nodes = nodes or 0
        kinds: tuple[Siblings, ...] = ("without_replacement", "iid")
        siblings = next((kind for kind in kinds if kind in verifier.siblings), None)
    check_options(system, drafter)
    if isinstance(drafter, DiffusionDrafter):
        return DiffusionProposer(drafter, tokens, system.steps, system.order)
    if isinstance(drafter, BlockDrafter):
        return BlockProposer(drafter, tokens, nodes, siblings)
    if isinstance(drafter, ForeignDrafter):
        return TranslatedProposer(drafter.network, drafter.tokenizer, drafters.target, tokens)
    if isinstance(drafter, Target):
        return AutoregressiveProposer(drafter, *([tokens] if tokens else []))
    proposer: Proposer = drafter
    return proposer


def check_options(system: GivenDrafter, drafter: object) -> None:
    """Raises UserError for options that only other drafters have."""
    stepwise = (system.steps, system.order) != (1, ORDERS[0])
    if stepwise and not isinstance(drafter, DiffusionDrafter):
        raise UserError("steps and order apply only to standalone diffusion drafters")
    if system.tree_nodes and not isinstance(drafter, BlockDrafter):
        raise UserError("tree_nodes applies only to block drafters")
