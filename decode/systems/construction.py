"""Decoders from methods: drafters are opened, and the system's proposer, controller and verifier put on a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from align.common.checksums import check_checksums
from align.common.errors import UserError
from align.common.hub import local_path
from align.common.text import say
from align.folder.trained_chat import chat_note
from align.models.block import BlockDrafter
from align.models.checkpoints.standalone import load_standalone, open_drafter
from align.models.standalone import DiffusionDrafter
from align.target.loading import load_target, load_tokenizer
from align.target.model import Target
from decode.drafters.base import Drafter
from decode.drafters.controllers import AdaptiveLength, Controller, CostAware, adaptive_range
from decode.engine import compiled
from decode.engine.decoder import Decoder
from decode.systems.drafter_folders import check_there
from decode.systems.parsing import Method, check_drafters, first_kind
from decode.systems.proposers import MAKERS, ForeignDrafter, OpenDrafters, check_masks
from decode.systems.registry import ANY, AUTOREGRESSIVE, DIFFUSION, SYSTEMS, Compiled, DraftingSystem
from decode.wrappers.adaptive import AdaptiveDrafter, SwitchingDrafter
from decode.wrappers.copying import CopyingDrafter
from decode.wrappers.vocabularies import VocabularyMap

_UNBRANCHED = {
    "specdiff": " (nodes=0)",
    "specdiff2": " (candidates=1)",
    "retrieval": " (nodes=0)",
    "block_tree": " (block does not)",
}
"""How to avoid branches."""


def build(method: Method, drafters: OpenDrafters, draft_tokens: int | None = None) -> Decoder:
    """The method's decoder.

    Args:
        draft_tokens: for a method that does not set them itself.

    Raises:
        UserError: a missing drafter, or options that do not fit the drafters; the message names the method.
    """
    check_drafters([method], drafters.drafters)
    try:
        return assemble(method, drafters, draft_tokens)
    except UserError as error:
        raise UserError(f"method {method.name!r}: {error}") from None


def assemble(method: Method, drafters: OpenDrafters, draft_tokens: int | None = None) -> Decoder:
    """`build`, with errors that do not name the method."""
    target, system = drafters.target, method.system
    if target.chains_only and method.branches:
        hint = _UNBRANCHED.get(system.name, "")
        raise UserError(f"target {target.spec!r} {target.why_chains_only}, so drafts may not branch{hint}")
    if isinstance(system, Compiled):
        say("compiled: torch.compile runs on the target, which takes half a minute or more", error=True)
        target = compiled.compiled(target)
    if not isinstance(system, DraftingSystem):
        return Decoder(target)
    if method.variants:
        proposer: Drafter = _make_switching(method, drafters, draft_tokens)
    else:
        proposer = _make_proposer(method, drafters, draft_tokens)
    if system.copying:
        longest = getattr(system, "draft_tokens", None) if "draft_tokens" in method.given else None
        longest = longest or draft_tokens
        proposer = CopyingDrafter(proposer, longest, longest) if longest else CopyingDrafter(proposer)
    return Decoder(target, proposer, method.verifier)


def _make_proposer(method: Method, drafters: OpenDrafters, draft_tokens: int | None) -> Drafter:
    """The proposer of a method without variants, with its controller."""
    if draft_tokens is not None:
        method = method.with_defaults({"draft_tokens": draft_tokens})
    system = method.system
    assert isinstance(system, DraftingSystem)
    proposer = MAKERS[type(system)](system, drafters)
    asked = getattr(system, "draft_tokens", None) if "draft_tokens" in method.given else None
    if asked and proposer.draft_tokens < asked:
        raise UserError(f"this drafter drafts at most {proposer.draft_tokens} tokens")
    controller = _find_controller(system.controller, proposer.draft_tokens)
    return proposer if controller is None else AdaptiveDrafter(proposer, controller)


def _make_switching(method: Method, drafters: OpenDrafters, draft_tokens: int | None) -> Drafter:
    """The proposer of a method with variants. Raises UserError for a system whose variants can't share a session."""
    system = method.system
    if not system.has_variants:
        able = ", ".join(name for name, other in SYSTEMS.items() if other.has_variants)
        raise UserError(
            f"one variant at a time (controller=cost chooses the length); these take several: {able}"
        )
    if isinstance(system, DraftingSystem) and system.controller != "fixed":
        raise UserError("either several variants or a controller, not both")
    variants = [_make_proposer(variant, drafters, draft_tokens) for variant in method.variants]
    return SwitchingDrafter(variants, [variant.name for variant in method.variants])


def _find_controller(name: str, longest: int) -> Callable[[], Controller] | None:
    if name == "cost":
        return CostAware
    if name == "adl":
        return lambda: AdaptiveLength(*adaptive_range(longest), smoothing=0.5)
    return None


def open_drafters(
    methods: Sequence[Method],
    folders: Mapping[str, str],
    target: Target,
    tokenizer: str | Path | None = None,
) -> OpenDrafters:
    """The drafters that these methods need, each opened once.

    Args:
        folders: by kind; the first one given comes first.
        tokenizer: of the first one, where its vocabulary is not the target's. The systems that take any drafter use it.

    Raises:
        UserError: a drafter that is not given, or can't be opened.
    """
    check_drafters(methods, folders)
    opened = OpenDrafters(target)
    needed = dict.fromkeys(kind for method in methods for kind in method.needs)
    foreign = ANY in needed and tokenizer is not None
    for kind in dict.fromkeys(first_kind(folders, kind) for kind in needed if kind != ANY or not foreign):
        if kind != AUTOREGRESSIVE:
            check_there(folders[kind])
        opened.drafters[kind] = open_one(folders[kind], kind, target)
    if ANY in needed:
        first = first_kind(folders, ANY)
        if tokenizer is None:
            opened.drafters[ANY] = opened.drafters[first]
        else:
            opened.drafters[ANY] = _open_foreign(folders[first], first, target, tokenizer)
    for folder in dict.fromkeys(folders[first_kind(folders, kind)] for kind in needed):
        if note := chat_note(folder, target.chat, target.tokenizer):
            say(note, error=True)
    return opened


def open_one(folder: str, kind: str, target: Target) -> BlockDrafter | DiffusionDrafter | Target:
    """A trained drafter of this kind. Raises UserError where it is missing or of another kind."""
    if kind == AUTOREGRESSIVE:
        check_checksums(local_path(folder))
        return load_target(
            folder,
            target.dtype_name,
            str(target.device),
            target.fast,
            round_to_bf16=target.fast,
            trust_remote_code=target.trust_remote_code,
        )
    drafter = open_drafter(folder, target)
    if isinstance(drafter, DiffusionDrafter) != (kind == DIFFUSION):
        raise UserError(f"--drafter {kind}={folder}: that is no drafter of the kind {kind}")
    if isinstance(drafter, DiffusionDrafter):
        return _prepare(drafter, target)
    drafter = drafter.to(target.dtype)
    if target.fast:
        drafter.prepare_for_drafting()
    return drafter


def _open_foreign(folder: str, kind: str, target: Target, tokenizer: str | Path) -> ForeignDrafter:
    """A standalone drafter with its own tokenizer. Raises UserError for a block drafter, or what does not exist."""
    network = open_one(folder, kind, target) if kind == AUTOREGRESSIVE else None
    vocabulary = load_tokenizer(tokenizer, target.trust_remote_code)
    if network is None:
        network = _prepare(load_standalone(folder, target, len(vocabulary)), target)
    assert not isinstance(network, BlockDrafter)
    return ForeignDrafter(network, VocabularyMap(vocabulary, target.tokenizer))


def _prepare(drafter: DiffusionDrafter, target: Target) -> DiffusionDrafter:
    check_masks(drafter)
    if target.fast:
        drafter.network.prepare_for_drafting()
    return drafter
