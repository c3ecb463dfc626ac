"""p of the next token at every place of a text, in one pass of the target's head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class TargetPlaces:
    """p of the next token at every text position P: one pass of the head serves all anchors.

    hidden_PD: the target's last hidden states. log_z_P: log-sum-exp over the WHOLE vocabulary of
    logits/temperature. best_P: argmax p. next_P: the token that follows. log_p_next_P: its
    log-probability. finish: turns the head's product into logits, given the columns' ids or None.
    """

    hidden_PD: Tensor
    log_z_P: Tensor
    best_P: Tensor
    next_P: Tensor
    log_p_next_P: Tensor
    temperature: float = 1.0
    finish: Callable[[Tensor, Tensor | None], Tensor] | None = None


@torch.no_grad()
def target_places(
    hidden_PD: Tensor,
    next_P: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
    chunk: int = 0,
    finish: Callable[[Tensor, Tensor | None], Tensor] | None = None,
) -> TargetPlaces:
    """Run the target's head, (chunk, D) → (chunk, V) logits at a time; p = softmax(logits /
    temperature). `finish`: as in `TargetPlaces`; `head` applies it already."""
    log_z, best, log_p = [], [], []
    chunk = chunk or (256 if hidden_PD.device.type == "cpu" else 4096)
    for part, following in zip(hidden_PD.split(chunk), next_P.split(chunk), strict=True):
        logits = head(part).float()
        if temperature != 1.0:
            logits = logits / temperature
        top, where = logits.max(-1)
        chosen = logits.gather(-1, following[:, None])[:, 0]
        # log-sum-exp in place: a fresh tensor of this size costs more than the sum
        log_z.append(logits.sub_(top[:, None]).exp_().sum(-1).log_().add_(top))
        best.append(where)
        log_p.append(chosen - log_z[-1])
    return TargetPlaces(
        hidden_PD, torch.cat(log_z), torch.cat(best), next_P, torch.cat(log_p), temperature, finish
    )
