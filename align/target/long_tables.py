"""Rotary tables that change with the length of a text (longrope of Phi-3, LongRoPE, arXiv 2402.13753, section 3.3).

Up to a length all keys of a text are turned by one table, beyond it all of them by another. transformers chooses the table by the
largest position of a call. So what a cache holds under the one is wrong under the other, and drafts that reach beyond the
length would change the tokens in front of it. Here each token is computed under the table of the text that ends with it: keys
of the other table are written again, from the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from align.target.cache import KVCache

States = tuple[Tensor, Tensor | None]
"""Normalised last hidden states (B, L, D) and tapped layer outputs (B, L, F, D), None = without taps."""
Run = Callable[[Tensor, Tensor, Tensor | None], States]
"""Tokens (B, L), their positions (1 or B, L), which of them each one sees (L, L) → their states, through the cache."""


def switch_length(config: Any, limit: int) -> int | None:
    """The longest text under the first table, where longer ones fit into the context of `limit` tokens; else None.

    Raises:
        NotImplementedError: the tables of its kinds of layers change at different lengths.
    """
    given = getattr(config, "rope_parameters", None) or {}
    groups = [given, *(group for group in given.values() if isinstance(group, dict))]
    names = "original_max_position_embeddings"
    lengths = {int(g[names]) for g in groups if g.get("rope_type") == "longrope" and g.get(names)}
    if len(found := {length for length in lengths if length < limit}) > 1:
        raise NotImplementedError("its rotary tables change at several lengths")
    return next(iter(found), None)


def steady(switch: int | None, caches: Sequence[KVCache], widths: Sequence[int]) -> bool:
    """Whether all of these requests stay under the first table with so many new tokens each."""
    if switch is None:
        return True
    return not any(c.long or c.length + n > switch for c, n in zip(caches, widths, strict=True))


def across(
    run: Run, switch: int, cache: KVCache, tokens_BL: Tensor, positions_BL: Tensor, see_LL: Tensor | None
) -> States:
    """Hidden states and taps of new tokens, each under the table of its own length.

    Where some lie beyond the length and others do not, the call runs under both tables; the text runs once more with each
    change. So a request pays for its text once, and again for drafts about the length that are rejected.
    """
    past, beyond_BL = cache.length, positions_BL >= switch
    found: dict[bool, States] = {}
    for long in (False, True):
        if bool((beyond_BL == long).any()):
            cache.length = past
            found[long] = _under(long, run, switch, cache, tokens_BL, positions_BL, see_LL)
    if len(found) == 1:
        return next(iter(found.values()))
    (short, short_taps), (far, far_taps) = found[False], found[True]
    hidden = torch.where(beyond_BL[..., None], far, short)
    if short_taps is None or far_taps is None:
        return hidden, None
    return hidden, torch.where(beyond_BL[..., None, None], far_taps, short_taps)


def _under(
    long: bool,
    run: Run,
    switch: int,
    cache: KVCache,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    see_LL: Tensor | None,
) -> States:
    """Those of the new tokens that belong to this table, right; the others only keep their places."""
    past, length = cache.length, tokens_BL.shape[1]
    # nothing on this side sees what lies beyond, so that its position there may be any
    positions_BL = positions_BL if long else positions_BL.clamp_max(switch - 1)
    again = past if cache.long != long else 0
    if again:
        assert cache.text_BL is not None
        tokens_BL = torch.cat((cache.text_BL[:, :past], tokens_BL), dim=1)
        before = torch.arange(past, device=positions_BL.device).expand(len(positions_BL), -1)
        positions_BL = torch.cat((before, positions_BL), dim=1)
        if see_LL is not None:
            whole = torch.ones(past + length, past + length, dtype=torch.bool, device=see_LL.device).tril_()
            whole[past:, past:] = see_LL
            see_LL = whole
        cache.length = 0
    hidden, taps = run(tokens_BL, positions_BL, see_LL)
    cache.long = long
    return hidden[:, again:], None if taps is None else taps[:, again:]
