"""Rotary tables that change with the length of a text (longrope of Phi-3, LongRoPE, arXiv
2402.13753, section 3.3).

Up to a length one table rotates all keys of a text, beyond it another. transformers selects it by
the largest position of a forward pass, so drafts that reach beyond the length would change the
tokens before it. Here each token is computed under the table of the text that ends with it: keys of
the other table are computed again, from the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specalign.lm.cache import KVCache

States = tuple[Tensor, Tensor | None]
"""Normalised last hidden states (B, L, D) and tapped layer outputs (B, L, F, D), None = without
taps."""
Run = Callable[[Tensor, Tensor, Tensor | None], States]
"""Tokens (B, L), their positions (1 or B, L), which of them each one sees (L, L) → their states,
through the cache."""


def switch_length(config: Any, limit: int) -> int | None:
    """The longest text under the first table, where longer ones fit into the context of `limit`
    tokens; else None.

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
    """Whether all of these requests stay under the first table with their new tokens."""
    if switch is None:
        return True
    return not any(c.long or c.length + n > switch for c, n in zip(caches, widths, strict=True))


def across(
    run: Run,
    switch: int,
    cache: KVCache,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    see_LL: Tensor | None,
) -> States:
    """Hidden states and taps of new tokens, each under the table of its own length.

    Tokens on both sides of the length run under both tables. The text runs again with each change
    of the table: once for each request, and after rejected drafts that crossed the length.
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
    """States under one table, right for those of the new tokens that belong to it."""
    past, length = cache.length, tokens_BL.shape[1]
    # no short position sees those beyond, whose positions do not matter then
    positions_BL = positions_BL if long else positions_BL.clamp_max(switch - 1)
    again = past if cache.long != long else 0
    if again:
        assert cache.text_BL is not None
        tokens_BL = torch.cat((cache.text_BL[:, :past], tokens_BL), dim=1)
        before = torch.arange(past, device=positions_BL.device).expand(len(positions_BL), -1)
        positions_BL = torch.cat((before, positions_BL), dim=1)
        if see_LL is not None:
            whole = torch.ones(
                past + length, past + length, dtype=torch.bool, device=see_LL.device
            ).tril_()
            whole[past:, past:] = see_LL
            see_LL = whole
        cache.length = 0
    hidden, taps = run(tokens_BL, positions_BL, see_LL)
    cache.long = long
    return hidden[:, again:], None if taps is None else taps[:, again:]
