"""Published rules that change the output's distribution: for comparison, never a default."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.speculation.drafts import Drafts
from decode.speculation.rules import Outcomes, in_turn, pick_tokens

TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3
"""Medusa's own setting."""
TOP_BETA = 3


def typical(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Lossy: accept x if p(x) > min(ε, δ·exp(−entropy of p)) (Medusa, eq. 1)."""
    entropy_BM = -torch.special.xlogy(p_BMV.double(), p_BMV.double()).sum(-1)
    least_BM = (TYPICAL_DELTA * (-entropy_BM).exp()).clamp(max=TYPICAL_EPSILON)
    batch = torch.arange(len(p_BMV), device=p_BMV.device)

    def test(i: int, r_BV: Tensor, above_BN: Tensor) -> tuple[Tensor, Tensor]:
        p_B = pick_tokens(r_BV, drafts.tokens_BN[:, i])
        return (p_B > least_BM[batch, above_BN[:, i]]).double(), r_BV

    return in_turn(p_BMV, drafts, test)


def top_beta(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Lossy: accept any of p's `TOP_BETA` most probable tokens (SpecDec, without its score
    bound)."""

    def test(i: int, r_BV: Tensor, above_BN: Tensor) -> tuple[Tensor, Tensor]:
        own_B1 = r_BV.gather(1, drafts.tokens_BN[:, i : i + 1])
        return ((r_BV > own_B1).sum(1) < TOP_BETA).double() * (own_B1[:, 0] > 0), r_BV

    return in_turn(p_BMV, drafts, test)
