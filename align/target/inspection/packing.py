"""Whether several texts can stand in one row for a model that is not told its tokens' positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_TOKENS = 32
_SAME = 0.02
"""The largest distance, as a share of their length, between states that are the same; bf16 has 0.01."""


def same_behind(states: Callable[[Tensor, Tensor, Tensor], Tensor], vocabulary: int, limit: int) -> bool:
    """Whether a text's last hidden states are the same alone and behind another text that a mask hides.

    Args:
        states: of tokens (1, L), positions (1, L) and a mask (1, 1, L, L), True = attend, the states (1, L, D).
        limit: the model's context.
    """
    length = max(1, min(_TOKENS, limit // 2))
    tokens = (torch.arange(2 * length) * 37 % vocabulary)[None]
    positions = torch.arange(length).repeat(2)[None]
    document = torch.arange(2).repeat_interleave(length)
    mask = (document[:, None] == document).tril()[None, None]
    behind = states(tokens, positions, mask)[:, length:].double()
    alone = states(tokens[:, length:], positions[:, length:], mask[..., length:, length:]).double()
    return bool((behind - alone).norm() <= _SAME * alone.norm())
