"""What training predicts of decoding: the expected τ and the acceptance per position, estimated on text.

The number that training reports has to be the one that the decoder measures; each function says on which text it is
unbiased. Shapes: A anchors (any leading dimensions), K drafted positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def expected_accepted_token(
    log_q_label: Tensor, p_label: Tensor, acceptance: Tensor, valid: Tensor
) -> Tensor:
    """Drafts accepted by token verification from each anchor, (…, K) → (…).

    Σ_m [Π_{j<m} min(1, q_j(x_j)/p_j(x_j))]·β_m with β_m = Σ_x min(p_m, q_m): unbiased over text x drawn from p at the
    same temperature, because the chance that verification keeps x_j, given that p would have drawn it, is
    min(1, q/p). Σ_m Π_{j≤m} β_j along one path is NOT: it multiplies averages that depend on the same path.
    Positions that are not `valid` end the sum.
    """
    ratio = (log_q_label.exp() / p_label.clamp_min(1e-30)).clamp_max(1.0) * valid
    reach = torch.cat((torch.ones_like(ratio[..., :1]), ratio.cumprod(-1)[..., :-1]), dim=-1)
    return (reach * acceptance * valid).sum(-1)


def accepted_greedy(match: Tensor, greedy_label: Tensor, valid: Tensor) -> Tensor:
    """Drafts accepted by greedy verification from each anchor, (…, K) → (…).

    Exact on text that the target wrote greedily: the leading run of positions where argmax q = argmax p. On other
    text a run ends after the first token that is not argmax p, because p of what follows is not known; those anchors
    count low.
    """
    hit = (match > 0.5) & valid
    on_path = torch.cat((torch.ones_like(hit[..., :1]), ((greedy_label > 0.5) & valid)[..., :-1]), dim=-1)
    return (hit & on_path).long().cumprod(-1).sum(-1).float()


@dataclass
class Estimate:
    """A mean with its standard error over anchors, and how many there were."""

    mean: float
    error: float
    count: int

    @staticmethod
    def of(values: Tensor) -> Estimate:
        """From one value an anchor. The error takes anchors as independent; anchors of one text are not quite."""
        count = values.numel()
        if count == 0:
            return Estimate(float("nan"), float("nan"), 0)
        error = float(values.double().std() / count**0.5) if count > 1 else float("nan")
        return Estimate(float(values.double().mean()), error, count)


def acceptance_per_position(acceptance: Tensor, valid: Tensor) -> Tensor:
    """Mean β_k at each position over the anchors valid there, (K,): given that the text reached it, not that drafts did."""
    flat, ok = acceptance.flatten(0, -2).double(), valid.flatten(0, -2).double()
    return ((flat * ok).sum(0) / ok.sum(0).clamp_min(1)).float()
