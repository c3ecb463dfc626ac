"""Decoders from methods: the system's drafter, behind its controller, with its verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from align.common.errors import UserError
from decode.methods.registry import SYSTEMS, Parts
from decode.methods.spec import COMMON, Method, check_parts

if TYPE_CHECKING:
    from align.target.model import Target
    from decode.drafters.base import Drafter
    from decode.drafters.controllers import Controller
    from decode.engine.decoder import Decoder


def build(method: Method, parts: Parts, gamma: int | None = None) -> Decoder:
    """The method's decoder. `gamma`: of a method that says none itself.

    Raises:
        UserError: a part that is not there, a value out of range.
    """
    from decode.engine.decoder import Decoder

    system = method.system
    check_parts([method], parts.drafters)
    if parts.target.chains_only and method.branches:
        raise UserError(
            f"method {method.name!r}: target {parts.target.spec!r} windows its attention by place, so drafts may not branch"
            f"{_UNBRANCHED.get(system.name, '')}"
        )
    drafter = _switching(method, parts, gamma) if method.ways else _drafter(method, parts, gamma)
    try:
        target = parts.target if system.target is None else system.target(parts.target)
    except UserError as error:
        raise UserError(f"method {method.name!r}: {error}") from None
    return Decoder(target, drafter, verifier_of(method))


_UNBRANCHED = {
    "specdiff": " (nodes=0)",
    "specdiff2": " (candidates=1)",
    "retrieval": " (nodes=0)",
    "block_tree": " (block does not)",
}


def verifier_of(method: Method) -> str:
    """The verifier that it names, or its system's: `auto` where drafts that the system would choose keep their q."""
    own = "auto" if method.given.get("keep_q") else method.system.verifier
    return method.given.get("verifier", own)


def _drafter(method: Method, parts: Parts, gamma: int | None) -> Drafter | None:
    """Of a method that leaves nothing open; None: it drafts nothing."""
    from decode.wrappers.adaptive import AdaptiveDrafter

    options = {k: v for k, v in method.options.items() if k not in COMMON}
    if gamma is not None and "gamma" in method.system.options:
        options = {"gamma": gamma, **options}
    try:
        drafter = method.system.make(parts, **options)
    except UserError as error:
        said = str(error).replace("draft_tokens=", "gamma=") if "gamma" in options else str(error)
        raise UserError(f"method {method.name!r}: {said}") from None
    most = 0 if drafter is None else drafter.draft_tokens
    if most and most < (method.options.get("gamma") or 0):
        raise UserError(f"method {method.name!r}: this drafter drafts at most {most} tokens")
    if drafter is not None and (make := _controller(method, drafter.draft_tokens)):
        return AdaptiveDrafter(drafter, make)
    return drafter


def _switching(method: Method, parts: Parts, gamma: int | None) -> Drafter:
    """Raises UserError for a system whose ways cannot share a session."""
    from decode.wrappers.adaptive import SwitchingDrafter

    if method.options.get("controller", "fixed") != "fixed":
        raise UserError(f"method {method.name!r}: either several ways or a controller, not both")
    if not method.system.switches:
        able = ", ".join(name for name, s in SYSTEMS.items() if s.switches)
        raise UserError(
            f"method {method.name!r}: one way at a time, with controller=cost as long as pays; these switch: {able}"
        )
    built = [_drafter(way, parts, gamma) for way in method.ways]
    return SwitchingDrafter([way for way in built if way is not None], [way.name for way in method.ways])


def _controller(method: Method, most: int) -> Callable[[], Controller] | None:
    from decode.drafters.controllers import AdaptiveLength, CostAware, adaptive_range

    match method.options.get("controller", method.system.controller):
        case "cost":
            return CostAware
        case "adl":
            return lambda: AdaptiveLength(*adaptive_range(most), smoothing=0.5)
    return None


def open_parts(methods: Sequence[Method], drafters: Mapping[str, str], target: Target) -> Parts:
    """The drafters that these methods are made of, each opened once.

    Raises:
        UserError: one that is not given, or can't be opened.
    """
    from decode.methods.drafter_loading import open_part

    check_parts(methods, drafters)
    roles = dict.fromkeys(role for method in methods for role in method.needs)
    return Parts(target, {role: open_part(drafters[role], role, target) for role in roles})
