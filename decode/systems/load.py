"""`decode.load`: opens a target and its drafter and builds a decoder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from decode.engine.decoder import Decoder
from decode.proposers.base import Proposer
from decode.systems.construction import OpenDrafters, assemble, build, check_options, open_drafters
from decode.systems.drafter_folders import (
    AUTO,
    DEFAULT_DRAFTER,
    NO_FOLDERS,
    check_there,
    drafters_by_kind,
    is_default,
    kind_of,
    read_drafters,
    shipped_for,
)
from decode.systems.parsing import Method, check_drafters, format_method, read_method
from decode.systems.registry import ANY, DRAFTER, LOOKUP, PLAIN, GivenDrafter
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.common.text import say
from specalign.lm.loading import load_target
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
    order: str = "left_to_right",
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
        tree_nodes: size of the draft tree verified per round; 0 = a chain. Default: depends on the
            temperature.
        copying: copy instead of drafting where the text repeats itself. Default: True with a
            trained drafter, False with `method`.
        steps, order: for standalone drafters: number of denoising passes, and the unmasking order.
        drafter_tokenizer: for a standalone drafter with its own vocabulary: hub id or folder.
        method: a system with its options, such as `specdiff:steps=4`. `drafter` then lists its
            drafters, as FOLDER or KIND=FOLDER,….
        trust_remote_code: run Python code shipped with the models.
        template_kwargs, system: variables of the target's chat template, and the system prompt for
            conversations without one.

    Raises:
        UserError: a file or model can't be found, read or combined, or an option is invalid.
    """
    options = GivenDrafter(
        verifier=None if verifier == "auto" else verifier,
        draft_tokens=draft_tokens,
        tree_nodes=tree_nodes,
        steps=steps,
        order=order,
        copying=bool(copying),
    )
    place = (str(dtype).removeprefix("torch."), str(device))
    model: JsonObject = {
        "trust_remote_code": trust_remote_code,
        "template_kwargs": template_kwargs,
        "system": system,
    }
    tokenizer = None if drafter_tokenizer is None else os.fspath(drafter_tokenizer)
    by_drafter = copying is None and method is None
    return _make_decoder(target, drafter, method, options, by_drafter, tokenizer, place, model)


def _make_decoder(
    target: str | os.PathLike[str] | Target,
    drafter: AnyDrafter | None,
    method: str | None,
    options: GivenDrafter,
    by_drafter: bool,
    tokenizer: str | None,
    place: tuple[str, str],
    model: JsonObject,
) -> Decoder:
    """The drafter's folder is checked before the target is loaded. `by_drafter`: whether to copy
    depends on the drafter."""
    spec = _target_spec(target)
    given, note = _resolve_drafter(spec, drafter, method is not None)
    if by_drafter and given is not None and given not in NO_FOLDERS:
        options = replace(options, copying=True)
    if method is not None:
        chosen, folders = _choose_by_name(method, given, options)
    else:
        chosen, folders = _choose_by_drafter(given, options, tokenizer)
    defaults = dict(options.given)
    draft_tokens = defaults.pop("draft_tokens", None)  # at most: a drafter may draft fewer
    chosen = chosen.with_defaults(defaults)
    if not isinstance(target, Target):
        target = load_target(spec, *place, decoding=True, **model)
    elif model["template_kwargs"] or model["system"] is not None:
        raise UserError(
            "pass template_kwargs and system to load_target: the target is already loaded"
        )
    if note:
        say(note, error=True)
    if given is None or isinstance(given, str):
        opened = open_drafters([chosen], folders, target, tokenizer)
    else:
        opened = OpenDrafters(target, {ANY: given})
    return (assemble if method is None else build)(chosen, opened, draft_tokens)


def _target_spec(target: object) -> str:
    if isinstance(target, Target):
        return target.spec
    if isinstance(target, str | os.PathLike):
        return os.fspath(target)
    raise UserError(
        f"target: must be a hub id, a folder or a GGUF file, not {type(target).__name__}"
    )


def _resolve_drafter(
    spec: str, drafter: AnyDrafter | None, by_name: bool
) -> tuple[str | Proposer | BlockDrafter | DiffusionDrafter | Target | None, str]:
    """The drafter, with paths as strings and `auto` resolved, and a note to print once the target
    is loaded."""
    if isinstance(drafter, os.PathLike):
        return os.fspath(drafter), ""
    if not isinstance(drafter, str) or drafter != AUTO:
        return drafter, ""
    shipped = shipped_for(spec)
    if shipped is not None or by_name:
        return shipped, ""
    where = f"at {DEFAULT_DRAFTER}" if is_default(spec) else f"is shipped for {spec}"
    return LOOKUP, f"note: no drafter {where}; drafting with prompt lookup"


def _choose_by_name(
    name: str, drafter: object, options: GivenDrafter
) -> tuple[Method, dict[str, str]]:
    """The method of this name, and the folders of its drafters by kind."""
    method, given = read_method(name), options.given
    if given and ANY not in method.needs:
        typed = format_method(name, {key: str(value).lower() for key, value in given.items()})
        raise UserError(f"method={name!r} takes its options after colons: method={typed!r}")
    if drafter is not None and not isinstance(drafter, str):
        check_drafters([method], {ANY: drafter})
        return method, {}
    folders = drafters_by_kind(read_drafters(drafter))
    check_drafters([method], folders)
    return method, folders


def _choose_by_drafter(
    drafter: object, options: GivenDrafter, tokenizer: str | None
) -> tuple[Method, dict[str, str]]:
    """The method that decodes with this drafter, and its folder by kind."""
    if drafter is None or drafter in NO_FOLDERS:
        check_options(options, trees=False)
        if tokenizer is not None:
            raise UserError("drafter_tokenizer needs a trained drafter, and none is given")
        return read_method(LOOKUP if drafter == LOOKUP else PLAIN), {}
    if not isinstance(drafter, str):
        return read_method(DRAFTER), {}
    check_there(drafter)
    return read_method(DRAFTER), {kind_of(drafter): drafter}
