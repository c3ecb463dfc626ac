"""`decode.load`: opens a target and its drafter and puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.standalone import DiffusionDrafter
from align.target.loading import load_target
from align.target.model import Target
from align.target.names import DEFAULT_TARGET
from decode.drafters.base import Drafter
from decode.engine.decoder import Decoder, check_options
from decode.method_names import written
from decode.methods.any_drafter import NO_STEPS, NO_TREES
from decode.methods.build import assemble, build, open_parts
from decode.methods.drafter_spec import NO_FOLDERS, check_there, drafters_by_role, role_of
from decode.methods.options import DraftOptions, in_methods
from decode.methods.registry import ANY, Parts
from decode.methods.spec import Method, check_parts, read_method


def load(
    target: str | Target = DEFAULT_TARGET,
    drafter: str | Path | Drafter | BlockDrafter | DiffusionDrafter | None = None,
    verifier: str = "auto",
    *,
    dtype: str = "auto",
    device: str = "auto",
    draft_tokens: int | None = None,
    tree_nodes: int | None = None,
    copying: bool | None = None,
    steps: int = 1,
    order: str = "left_to_right",
    drafter_tokenizer: str | Path | None = None,
    method: str | None = None,
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    system: str | None = None,
    **unknown: Any,
) -> Decoder:
    """A decoder for a target.

    Args:
        target: hub id, folder, GGUF file or `debug`; or one already loaded.
        drafter: a trained drafter's folder or hub id, `lookup`, `none` or None (plain decoding), or one
            already loaded.
        verifier: see `Decoder`.
        dtype, device: where `target` is to be loaded; see `align.target.loading.load_target`.
        draft_tokens: draft at most this many tokens ahead; default: the drafter's own number.
        tree_nodes: verify this many drafted tokens a call, branching; 0 = a chain of `draft_tokens`. Default:
            by the temperature (`decode.drafters.block`); a chain for verifiers that are exact for drawn drafts alone, for
            which trees are drawn with siblings that the verifier accepts.
        steps, order: of standalone drafters: how many passes unmask a draft, and in which order
            (`decode.drafters.diffusion`).
        drafter_tokenizer: hub id or folder of the tokenizer of a standalone drafter whose vocabulary is not the target's.
        copying: where the text repeats itself, copy instead of drafting (`decode.wrappers.copying`). Default: yes before a trained
            drafter, no with `method`.
        method: a system by name with its options, `specdiff:steps=4` (`decode.methods.registry`). `drafter` then names the drafters
            that it needs, FOLDER or KIND=FOLDER,…; other options of drafting go with the systems `drafter` and `combined` alone.
        trust_remote_code: run Python code that comes with these models.
        template_kwargs: variables of the target's chat template, by name (`{"enable_thinking": False}`).
        system: the system prompt of every conversation that has none.

    Raises:
        UserError: what can't be found, read or combined, and an option that there is not.
    """
    check_options("decode.load", unknown)
    if copying is None:
        copying = method is None and drafter is not None and drafter not in NO_FOLDERS
    tokenizer = None if drafter_tokenizer is None else str(drafter_tokenizer)
    options = DraftOptions(verifier, draft_tokens, tree_nodes, steps, order, copying, tokenizer)
    # before anything is loaded: it may be misspelt
    chosen, folders = _by_drafter(drafter, options) if method is None else _by_name(method, drafter, options)
    chosen = chosen.with_defaults(options.of_a_method)
    where = _opened(target, dtype, device, trust_remote_code, template_kwargs, system)
    if drafter is None or isinstance(drafter, str | Path):
        parts = open_parts([chosen], folders, where, tokenizer)
    else:
        parts = Parts(where, {ANY: drafter})
    return (assemble if method is None else build)(chosen, parts, draft_tokens)


def _opened(
    target: str | Target,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    template_kwargs: Mapping[str, Any] | None,
    system: str | None,
) -> Target:
    if isinstance(target, str):
        return load_target(
            target,
            dtype,
            device,
            trust_remote_code=trust_remote_code,
            template_kwargs=template_kwargs,
            system=system,
            decoding=True,
        )
    if template_kwargs or system is not None:
        raise UserError(
            "template_kwargs and system are the target's: this one is loaded, give them to load_target"
        )
    return target


def _by_name(name: str, drafter: object, options: DraftOptions) -> tuple[Method, dict[str, str]]:
    """The method of this name, and the folders of the drafters that it needs by their kinds."""
    chosen = read_method(name)
    if options.given and ANY not in chosen.needs:
        asked = written(name, {in_methods(key): str(value).lower() for key, value in options.given.items()})
        read_method(asked)  # which may have no such option
        raise UserError(f"method={name!r} takes its options behind colons: method={asked!r}")
    folders = drafters_by_role(None if drafter is None else str(drafter))
    check_parts([chosen], folders, python=True)
    return chosen, folders


def _by_drafter(drafter: object, options: DraftOptions) -> tuple[Method, dict[str, str]]:
    """The method that decodes with this drafter, and its folder by its kind."""
    if drafter is None or drafter in NO_FOLDERS:
        if options.steps != 1 or options.order != DraftOptions.order:
            raise UserError(NO_STEPS)
        if options.tree_nodes:
            raise UserError(NO_TREES)
        if options.drafter_tokenizer is not None:
            raise UserError("drafter_tokenizer is a trained drafter's: this one has none")
        return read_method("lookup" if drafter == "lookup" else "plain"), {}
    if not isinstance(drafter, str | Path):
        return read_method("drafter"), {}
    check_there(str(drafter))
    return read_method("drafter"), {role_of(str(drafter)): str(drafter)}
