"""Decoders from methods: the system's drafter, behind its controller, with its verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from align.common.errors import UserError
from align.common.text import say
from align.folder.trained_chat import chat_note
from decode.methods.drafter_spec import check_there
from decode.methods.registry import ANY, COMMON, SYSTEMS, Parts
from decode.methods.spec import Method, check_parts, role_in

if TYPE_CHECKING:
    from pathlib import Path

    from align.target.model import Target
    from decode.drafters.base import Drafter
    from decode.drafters.controllers import Controller
    from decode.engine.decoder import Decoder


def build(method: Method, parts: Parts, gamma: int | None = None) -> Decoder:
    """The method's decoder. `gamma`: for a method that does not say it itself.

    Raises:
        UserError: a part that is not there, or a value out of range; the line names the method.
    """
    check_parts([method], parts.drafters)
    try:
        return assemble(method, parts, gamma)
    except UserError as error:
        said = str(error)
        if "gamma" in method.system.options:
            said = said.replace("draft_tokens=", "gamma=")
        raise UserError(f"method {method.name!r}: {said}") from None


def assemble(method: Method, parts: Parts, gamma: int | None = None) -> Decoder:
    """`build` with errors that name no method."""
    from decode.engine.decoder import Decoder
    from decode.wrappers.copying import CopyingDrafter

    system = method.system
    if parts.target.chains_only and method.branches:
        raise UserError(
            f"target {parts.target.spec!r} {parts.target.why_chains_only}, so drafts may not branch"
            f"{_UNBRANCHED.get(system.name, '')}"
        )
    drafter = _switching(method, parts, gamma) if method.variants else _drafter(method, parts, gamma)
    if drafter is not None and method.given.get("copying", system.copying):
        most = method.given.get("gamma") or gamma
        drafter = CopyingDrafter(drafter, most, most) if most else CopyingDrafter(drafter)
    target = parts.target if system.target is None else system.target(parts.target)
    return Decoder(target, drafter, verifier_of(method))


_UNBRANCHED = {
    "specdiff": " (nodes=0)",
    "specdiff2": " (candidates=1)",
    "retrieval": " (nodes=0)",
    "block_tree": " (block does not)",
}


def verifier_of(method: Method) -> str:
    """The method's verifier: the one that it names, else `auto` with keep_q=true, else its system's."""
    own = "auto" if method.given.get("keep_q") else method.system.verifier
    return method.given.get("verifier", own)


def _drafter(method: Method, parts: Parts, gamma: int | None) -> Drafter | None:
    """The drafter of a method without variants; None: it drafts nothing."""
    from decode.wrappers.adaptive import AdaptiveDrafter

    known = method.system.options
    options: dict[str, Any] = {k: v for k, v in method.options.items() if k in known or k not in COMMON}
    if gamma is not None and "gamma" in known:
        options = {"gamma": gamma, **options}
    drafter = method.system.make(parts, **options)
    most = 0 if drafter is None else drafter.draft_tokens
    if most and most < (method.options.get("gamma") or 0):
        raise UserError(f"this drafter drafts at most {most} tokens")
    if drafter is not None and (make := _controller(method, drafter.draft_tokens)):
        return AdaptiveDrafter(drafter, make)
    return drafter


def _switching(method: Method, parts: Parts, gamma: int | None) -> Drafter:
    """The drafter of a method with variants. Raises UserError for a system whose variants cannot share a session."""
    from decode.wrappers.adaptive import SwitchingDrafter

    if method.options.get("controller", "fixed") != "fixed":
        raise UserError("either several variants or a controller, not both")
    if not method.system.switches:
        able = ", ".join(name for name, s in SYSTEMS.items() if s.switches)
        raise UserError(
            f"one variant at a time (controller=cost chooses the length); these take several: {able}"
        )
    built = [_drafter(variant, parts, gamma) for variant in method.variants]
    return SwitchingDrafter([d for d in built if d is not None], [m.name for m in method.variants])


def _controller(method: Method, most: int) -> Callable[[], Controller] | None:
    from decode.drafters.controllers import AdaptiveLength, CostAware, adaptive_range

    match method.options.get("controller", method.system.controller):
        case "cost":
            return CostAware
        case "adl":
            return lambda: AdaptiveLength(*adaptive_range(most), smoothing=0.5)
    return None


def open_parts(
    methods: Sequence[Method],
    drafters: Mapping[str, str],
    target: Target,
    tokenizer: str | Path | None = None,
) -> Parts:
    """The drafters that these methods need, each opened once.

    Args:
        drafters: folders by role; the first one given comes first.
        tokenizer: of the first one, where its vocabulary is not the target's. The systems that take any drafter use it.

    Raises:
        UserError: a drafter that is not given, or can't be opened.
    """
    from decode.methods.any_drafter import open_foreign, open_part

    check_parts(methods, drafters)
    parts = Parts(target)
    asked = dict.fromkeys(role for method in methods for role in method.needs)
    foreign = ANY in asked and tokenizer is not None
    for role in dict.fromkeys(role_in(drafters, r) for r in asked if r != ANY or not foreign):
        if role != "autoregressive":
            check_there(drafters[role])
        parts.drafters[role] = open_part(drafters[role], role, target)
    if foreign:
        first = role_in(drafters, ANY)
        assert tokenizer is not None
        parts.drafters[ANY] = open_foreign(drafters[first], first, target, tokenizer)
    elif ANY in asked:
        parts.drafters[ANY] = parts.drafters[role_in(drafters, ANY)]
    for folder in dict.fromkeys(drafters[role_in(drafters, role)] for role in asked):
        if note := chat_note(folder, target.chat, target.tokenizer):
            say(note, error=True)
    return parts
