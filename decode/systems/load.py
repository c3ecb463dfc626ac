"""`decode.load`: opens a target and its drafter and builds a decoder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from decode.engine.decoder import Decoder
from decode.proposers.base import Proposer
from decode.systems.construction import (
    Network,
    OpenDrafters,
    assemble,
    build,
    check_options,
    open_drafters,
)
from decode.systems.drafter_folders import (
    AUTO,
    NO_FOLDERS,
    check_there,
    drafters_by_kind,
    kind_of,
    read_drafters,
    shipped_for,
)
from decode.systems.parsing import Method, check_drafters, format_method, read_method
from decode.systems.registry import ANY, DRAFTER, LOOKUP, ORDERS, PLAIN, GivenDrafter
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.lm.names import DEFAULT_TARGET

AnyDrafter = str | os.PathLike[str] | Proposer | Network


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
        tree_nodes: size of the draft tree verified per round; 0 = a chain. Default: depends on the
            temperature.
        copying: copy instead of drafting where the text repeats itself. Default: True with a
            trained drafter, False with `method`.
        steps, order: for standalone drafters: number of denoising passes, and the unmasking order.
        method: a system with its options, such as `specdiff:steps=4`. `drafter` then lists its
            drafters, as FOLDER or KIND=FOLDER,….
        trust_remote_code: run Python code shipped with the models.
        template_kwargs, system: variables of the target's chat template, and the system prompt for
            conversations without one.

    Raises:
        UserError: a file or model can't be found, read or combined, or an option is invalid.
    """
    if not isinstance(target, str | os.PathLike | Target):
        given = type(target).__name__
        raise UserError(f"target: must be a hub id, a folder or a GGUF file, not {given}")
    spec = target.spec if isinstance(target, Target) else os.fspath(target)
    if drafter == AUTO:
        drafter = shipped_for(spec)
        if drafter is None and method is None:
            drafter = LOOKUP
            say(f"note: no drafter is shipped for {spec}; drafting with prompt lookup", error=True)
    elif isinstance(drafter, os.PathLike):
        drafter = os.fspath(drafter)
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
    if not isinstance(target, Target):
        target = load_target(
            spec, str(dtype).removeprefix("torch."), str(device), decoding=True,
            trust_remote_code=trust_remote_code, template_kwargs=template_kwargs, system=system,
        )  # fmt: skip
    elif template_kwargs or system is not None:
        raise UserError("pass template_kwargs and system to load_target: the target is loaded")
    if drafter is None or isinstance(drafter, str):
        opened = open_drafters([chosen], folders, target)
    else:
        opened = OpenDrafters(target, {ANY: drafter})
    return (assemble if method is None else build)(chosen, opened, draft_tokens)


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
            folders = drafters_by_kind(read_drafters(drafter))
        check_drafters([method], folders or ({} if drafter is None else {ANY: drafter}))
    elif drafter is None or drafter in NO_FOLDERS:
        check_options(options, trees=False)
        method = read_method(LOOKUP if drafter == LOOKUP else PLAIN)
    else:
        method = read_method(DRAFTER)
        if isinstance(drafter, str):
            check_there(drafter)
            folders = {kind_of(drafter): drafter}
    given.pop("draft_tokens", None)  # at most: a drafter may draft fewer
    return method.with_defaults(given), folders
