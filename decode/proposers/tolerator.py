"""Tolerator (arXiv 2510.05090): masks are filled as usual; then for some rounds a part is masked
again and decoded given the rest, so that tokens chosen independently become consistent. Law
`point`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.proposers.diffusion import DiffusionSession, StandaloneProposer
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import best


class ToleratorSession(DiffusionSession):
    proposer: ToleratorProposer

    def propose(self, k: int) -> Proposal:
        rounds = self.proposer.rounds if k > 1 else 0
        block_K = self.append_masks(k)
        peak_K = torch.zeros(k, dtype=torch.float32, device=block_K.device)
        for remaining in range(min(self.proposer.steps, k), 0, -1):
            masks = int((block_K == self.drafter.mask_id).sum())
            self._fill(block_K, peak_K, math.ceil(masks / remaining))
        for r in range(1, rounds + 1):
            count = max(1, min(k - 1, round(k * math.cos(math.pi / 2 * r / rounds))))
            block_K[peak_K.topk(count, largest=False).indices] = self.drafter.mask_id
            self._fill(block_K, peak_K, count)
        return Proposal(block_K, "point")

    def _fill(self, block_K: Tensor, peak_K: Tensor, count: int) -> None:
        """Fill the `count` masks where q is most peaked with the argmax and record the peaks, in
        place."""
        logits_KV = self.context.denoise(block_K)
        new_peak_K = logits_KV.softmax(-1).amax(-1)
        filled_K = block_K != self.drafter.mask_id
        at = new_peak_K.masked_fill(filled_K, -1.0).topk(count).indices.sort().values
        peak_K[at] = new_peak_K[at]
        block_K[at] = best(logits_KV[at], self.request.sampling, self.before(at), overwrite=True)


@dataclass(eq=False)
class ToleratorProposer(StandaloneProposer):
    """A standalone drafter over the target's vocabulary that fills K masks in T steps, the most
    confident first, and then refines them.

    Args:
        draft_tokens: K, default its training's block.
        steps: T, of the filling.
        rounds: R refining rounds; round r masks the least confident share cos(π/2·r/R) of the
            positions, at least one and never all (the paper's annealed rate).
    """

    name = "tolerator"
    session = ToleratorSession
    steps: int = 1
    rounds: int = 2
