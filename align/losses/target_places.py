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
    logits/temperature. best_P: argmax p. next_P: the token that follows in the text. log_p_next_P:
    its log-probability. finish: turns the head's product (rows, columns) into logits, given the
    columns' ids (None = all), in place or not. top: replaces `hidden_PD` if only the most probable
    tokens are stored.
    """

    hidden_PD: Tensor
    log_z_P: Tensor
    best_P: Tensor
    next_P: Tensor
    log_p_next_P: Tensor
    temperature: float = 1.0
    finish: Callable[[Tensor, Tensor | None], Tensor] | None = None
    top: TopTokens | None = None


@dataclass
class TopTokens:
    """The k most probable tokens at every place and their log p; p of all others counts as 0."""

    ids_Pk: Tensor
    log_p_Pk: Tensor

    def __getitem__(self, places: Tensor) -> TopTokens:
        return TopTokens(self.ids_Pk[places], self.log_p_Pk[places])


@torch.no_grad()
def target_places(
    hidden_PD: Tensor,
    next_P: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
    chunk: int = 0,
    finish: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    top_k: int = 0,
) -> TargetPlaces:
    """Run the target's head, (chunk, D) → (chunk, V) logits at a time; `chunk` 0 = chosen by
    device.

    p = softmax(logits / temperature). `finish`: as in `TargetPlaces`; `head` applies it already.
    `top_k`: size of `TargetPlaces.top`; 0 = none.
    """
    log_z, best, log_p, tops = [], [], [], []
    chunk = chunk or (256 if hidden_PD.device.type == "cpu" else 4096)
    for part, following in zip(hidden_PD.split(chunk), next_P.split(chunk), strict=True):
        logits = head(part).float()
        if temperature != 1.0:
            logits = logits / temperature
        if top_k:
            tops.append(logits.topk(min(top_k, logits.shape[-1])))
        top, where = logits.max(-1)
        chosen = logits.gather(-1, following[:, None])[:, 0]
        # log-sum-exp in place: a fresh tensor of this size costs more than the sum
        log_z.append(logits.sub_(top[:, None]).exp_().sum(-1).log_().add_(top))
        best.append(where)
        log_p.append(chosen - log_z[-1])
    log_z_P, found = torch.cat(log_z), None
    if top_k:
        values, ids = (torch.cat(each) for each in zip(*tops, strict=True))
        found = TopTokens(ids, values - log_z_P[:, None])
    return TargetPlaces(
        hidden_PD, log_z_P, torch.cat(best), next_P, torch.cat(log_p), temperature, finish, found
    )
