"""`decode.load`: a target and whatever drafts for it, opened and put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from align.common.errors import UserError, nearest
from align.models.block import BlockDrafter
from align.models.standalone import DiffusionDrafter
from align.target.loading import DEFAULT_TARGET, load_target
from align.target.model import Target
from decode.drafters.base import Drafter, check_range
from decode.drafters.block import BlockProposer
from decode.drafters.diffusion import ORDERS, DiffusionProposer
from decode.drafters.lookup import LookupDrafter
from decode.engine.decoder import Decoder
from decode.methods.drafter_loading import _check_masks, _read
from decode.methods.drafter_spec import NO_FOLDERS, check_there, drafters_by_role
from decode.speculation.proposal import Siblings
from decode.speculation.tree import MOST_NODES
from decode.speculation.verifiers import find
from decode.wrappers.copying import CopyingDrafter


def load(
    target: str | Target = DEFAULT_TARGET,
    drafter: str | Path | Drafter | BlockDrafter | DiffusionDrafter | None = None,
    verifier: str = "auto",
    *,
    dtype: str = "auto",
    device: str = "auto",
    draft_tokens: int | None = None,
    tree_nodes: int | None = None,
    copying: bool = False,
    steps: int = 1,
    order: str = "left_to_right",
    drafter_tokenizer: str | Path | None = None,
    method: str | None = None,
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
            by the temperature (`decode.drafters.block`). For verifiers that test drafts which were drawn: a chain, and
            trees are drawn with the siblings that the verifier takes.
        steps, order: of standalone drafters: how many passes unmask a draft, and in which order
            (`decode.drafters.diffusion`).
        drafter_tokenizer: hub id or folder of the tokenizer of a standalone drafter whose vocabulary is not the target's.
        copying: where the text repeats itself, copy instead of drafting (`decode.drafters.copying`).
        method: a system by name with its options, `specdiff:steps=4` (`decode.systems`); `drafter` is then what it is made of,
            FOLDER or KIND=FOLDER,…, and no other option of drafting goes with it.

    Raises:
        UserError: what can't be found, read or combined.
    """
    if method is not None:
        given = (draft_tokens, tree_nodes, drafter_tokenizer, verifier, steps, order, copying)
        return _by_name(method, target, drafter, dtype, device, given)
    _check_options(draft_tokens, tree_nodes, steps, order, verifier)
    if isinstance(drafter, str | Path):
        check_there(str(drafter))
    if isinstance(target, str):
        target = load_target(target, dtype=dtype, device=device)
    if tree_nodes is None and target.chains_only:
        tree_nodes = 0
    siblings: Siblings | None = None
    if verifier != "auto" and "point" not in find(verifier).laws:  # drafts have to be drawn
        tree_nodes = tree_nodes or 0
        fitting = find(verifier).siblings
        siblings = next((x for x in ("without_replacement", "iid") if x in fitting), None)
    if isinstance(drafter, str | Path) and drafter not in NO_FOLDERS:
        drafter = _read(drafter, target, drafter_tokenizer, draft_tokens)
    if isinstance(drafter, DiffusionDrafter):
        _check_masks(drafter)
        drafter = DiffusionProposer(drafter, draft_tokens, steps, order, False, tree_nodes or 0, siblings)
    elif steps != 1 or order != ORDERS[0]:
        raise UserError(
            "steps and order are a standalone drafter's (DDiT, masked language model): this one has none"
        )
    found = _drafter(drafter, draft_tokens, tree_nodes, siblings)
    if copying and found is not None:
        found = (
            CopyingDrafter(found)
            if draft_tokens is None
            else CopyingDrafter(found, draft_tokens, draft_tokens)
        )
    return Decoder(target, found, verifier)


def _by_name(
    method: str, target: str | Target, drafter: Any, dtype: str, device: str, others: tuple[Any, ...]
) -> Decoder:
    """A system. `others`: options of `load` that would go unread."""
    from decode.methods.build import build, open_parts
    from decode.methods.spec import check_parts, read_method

    if others != (None, None, None, "auto", 1, ORDERS[0], False):
        raise UserError(f"method={method!r} takes its options behind colons ({method.split(':')[0]}:gamma=4)")
    read = read_method(method)  # what is misspelt or not there is said before anything is loaded
    folders = drafters_by_role(None if drafter is None else str(drafter))
    check_parts([read], folders)
    where = load_target(target, dtype=dtype, device=device) if isinstance(target, str) else target
    return build(read, open_parts([read], folders, where))


def _check_options(
    draft_tokens: int | None, tree_nodes: int | None, steps: int, order: str, verifier: str
) -> None:
    check_range("draft_tokens", draft_tokens, 1, None)
    if tree_nodes is not None and not 0 <= tree_nodes <= MOST_NODES:
        raise UserError(f"tree_nodes={tree_nodes!r}: must be 0 (a chain) to {MOST_NODES}")
    check_range("steps", steps, 1, None)
    if order not in ORDERS:
        raise UserError(f"order={order!r} is unknown{nearest(order, ORDERS)}")
    if verifier != "auto":
        find(verifier)


def _drafter(
    drafter: str | Path | Drafter | BlockDrafter | None,
    draft_tokens: int | None,
    tree_nodes: int | None,
    siblings: Siblings | None,
) -> Drafter | None:
    if drafter is None or drafter == "none":
        return None
    if drafter == "lookup":
        return LookupDrafter(draft_tokens) if draft_tokens else LookupDrafter()
    if isinstance(drafter, BlockDrafter):
        return BlockProposer(drafter, draft_tokens, tree_nodes, siblings)
    assert not isinstance(drafter, str | Path)
    return drafter
