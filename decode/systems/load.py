"""`decode.load`: opens a target and its drafter as a decoder."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from decode.engine.decoder import Decoder
from decode.proposers.base import Proposer
from decode.systems import drafter_folders, registry
from decode.systems.construction import assemble, build, check_options
from decode.systems.drafter_folders import AUTO, NO_FOLDERS, check_there
from decode.systems.opening import OpenDrafters, open_drafters
from decode.systems.parsing import Method, check_drafters, check_engine, format_method, read_method
from decode.systems.registry import ANY, ORDERS, GivenDrafter
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.lm.names import DEFAULT_TARGET
from specalign.models.block import BlockDrafter
from specalign.models.standalone import DiffusionDrafter

AnyDrafter = str | os.PathLike[str] | Proposer | BlockDrafter | DiffusionDrafter | Target

_FOREIGN = "a standalone drafter given as a folder or Hub id"


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
    engine: str = "auto",
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    system: str | None = None,
) -> Decoder:
    """Load a target and its drafter as a decoder.

    Args:
        target: hub id, folder, GGUF file or `debug`; or a loaded target.
        drafter: a trained drafter (folder, hub id or loaded), `lookup`, None or `none` (plain
            decoding), or `auto`: the shipped one for the default target, else `lookup`.
        verifier: see `Decoder`. dtype, device: of the target, see `load_target`.
        draft_tokens: maximum number of tokens to draft ahead; default: the drafter's block size.
        tree_nodes: of block drafters: size of the draft tree; 0 = a chain. Default: by temperature.
        copying: copy where the text repeats itself. Default: with a drafter and no `method`.
        steps, order: for standalone drafters: number of denoising passes, and the unmasking order.
        drafter_tokenizer: folder or hub id, for a standalone drafter of another vocabulary.
        method: a system such as `specdiff:steps=4`; `drafter` is then FOLDER or KIND=FOLDER,….
        engine: eager; captured (on a GPU: CUDA graphs), which falls back to eager; or auto.
        trust_remote_code, template_kwargs, system: see `load_target`.

    Raises:
        UserError: a file or model can't be found, read or combined, or an option is invalid.
    """
    spec = _spec_of(target, bool(template_kwargs) or system is not None)
    check_engine(engine)
    drafter = _choose_drafter(drafter, spec, method)
    trained = drafter is not None and drafter not in NO_FOLDERS
    options = GivenDrafter(
        verifier=None if verifier == "auto" else verifier, draft_tokens=draft_tokens,
        tree_nodes=tree_nodes, steps=steps, order=order,
        copying=trained and method is None if copying is None else copying,
    )  # fmt: skip
    chosen, folders = _choose_method(method, drafter, options)
    if drafter_tokenizer is not None and not (folders and ANY in chosen.needs):
        raise UserError(f"drafter_tokenizer requires {_FOREIGN}")
    if not isinstance(target, Target):
        target = load_target(
            spec, str(dtype).removeprefix("torch."), str(device), decoding=True,
            trust_remote_code=trust_remote_code, template_kwargs=template_kwargs, system=system,
        )  # fmt: skip
    opened = OpenDrafters(target, {ANY: drafter})
    if drafter is None or isinstance(drafter, str):
        opened = open_drafters([chosen], folders, target, drafter_tokenizer)
    opened.engine, opened.paced = engine, True
    return (assemble if method is None else build)(chosen, opened, draft_tokens)


def _spec_of(target: object, has_chat_options: bool) -> str:
    """A target's name. Raises UserError for what is none, or options of its chat template where it
    is loaded already."""
    if isinstance(target, Target):
        if has_chat_options:
            what = "pass template_kwargs and system to load_target"
            raise UserError(f"the target is already loaded; {what}")
        return target.spec
    if not isinstance(target, str | os.PathLike):
        raise UserError(f"target={target!r:.40}: must be a hub id, a folder or a GGUF file")
    return os.fspath(target)


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
