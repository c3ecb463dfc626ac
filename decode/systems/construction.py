"""Decoders from methods: combines a system's proposer, controller and verifier with a target."""

from collections.abc import Callable

from decode.captured.engine import CapturedEngine
from decode.captured.graph import Backend
from decode.engine.decoder import Decoder
from decode.engine.loop import EagerEngine
from decode.engine.request import Engine
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
from decode.systems import registry
from decode.systems.opening import ForeignDrafter, OpenDrafters
from decode.systems.parsing import Method, check_drafters
from decode.systems.registry import ANY, AUTOREGRESSIVE, DIFFUSION, ORDERS, GivenDrafter
from specalign.common.errors import UserError
from specalign.lm.loading import reload
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.standalone import DiffusionDrafter


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
        raise target.branch_error()
    if draft_tokens is not None:
        method = method.with_defaults({"draft_tokens": draft_tokens})
    system = method.system
    if not isinstance(system, registry.DraftingSystem):
        return Decoder(target, engine=_make_engine(drafters, None))
    proposer = _make_proposer(system, drafters)
    longest = proposer.draft_tokens
    if longest < (method.typed("draft_tokens") or 0):
        raise UserError(f"this drafter drafts at most {longest} tokens")
    if system.copying:
        proposer = CopyingProposer(proposer, *([asked, asked] if asked else []))
    return Decoder(target, proposer, system.verifier_name, _make_engine(drafters, proposer))


def _make_engine(drafters: OpenDrafters, proposer: Proposer | None) -> Engine:
    """The engine. `auto`: captured on a GPU. Raises UserError for `compiled`
    elsewhere: Inductor does not see C kernels."""
    name, target = drafters.engine, drafters.target
    on_gpu = target.device.type == "cuda"
    if name == "compiled" and not on_gpu:
        raise UserError("engine=compiled needs a GPU; use eager, whose C kernels are faster here")
    if name in ("captured", "compiled") or (name == "auto" and on_gpu):
        backend: Backend | None = "compiled" if name == "compiled" else None
        return CapturedEngine(target, proposer, backend, drafters.paced)
    return EagerEngine(drafters.paced)


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
