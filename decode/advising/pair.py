"""Decoders of one pair that differ in how much they draft, the drafter opened once."""

from __future__ import annotations

from collections.abc import Callable

from align.common.errors import UserError
from align.target.model import Target
from decode.advising.observed import Setting
from decode.engine.decoder import Decoder
from decode.systems.construction import assemble, open_drafters
from decode.systems.drafter_folders import NO_FOLDERS, check_there, kind_of, shipped_for
from decode.systems.parsing import read_method


def decoders(
    target: Target, name: str, drafter: str | None, longest: int | None
) -> tuple[Callable[[Setting], Decoder], int, bool]:
    """What makes the decoder of a setting, the drafts of the longest chain, and whether trees can be tried.

    Args:
        name: the target's. drafter: a folder or `lookup`; None = the shipped one. longest: at most so many drafts.

    Raises:
        UserError: no drafter, or one that can't be opened.
    """
    drafter = drafter or shipped_for(name)
    if drafter is None or drafter == "none":
        raise UserError(f"no drafter is shipped for {name}: give --drafter FOLDER, or --drafter lookup")
    if drafter in NO_FOLDERS:
        folders, role = {}, ""
    else:
        check_there(drafter)
        role = kind_of(drafter)
        folders = {role: drafter}
    method = read_method("lookup" if drafter == "lookup" else "drafter")
    parts = open_drafters([method], folders, target)
    made: dict[object, Decoder] = {}

    def of(setting: Setting) -> Decoder:
        if setting not in made:
            made[setting] = _decoder(setting)
        return made[setting]

    def _decoder(setting: Setting) -> Decoder:
        if setting.tokens == 0:
            return Decoder(target)
        if drafter == "lookup":
            return assemble(method, parts, setting.tokens)
        return assemble(method.with_options(tree_nodes=setting.nodes), parts, setting.tokens)

    first = assemble(method, parts, longest)
    assert first.drafter is not None
    return (
        of,
        min(longest or first.drafter.draft_tokens, first.drafter.draft_tokens),
        role == "block" and not target.chains_only,
    )
