"""Refined drafts (Tolerator, arXiv 2510.05090): masks are filled as usual; then for some rounds a part is masked again and decoded
given the rest, so that tokens that were chosen independently of each other become consistent.

The result is not a draw from a known q: law `point`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from align.models.standalone import DiffusionDrafter
from decode.drafters.base import Request, check_range
from decode.drafters.diffusion import DiffusionSession
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling, best


class ToleratorDrafter:
    """A standalone drafter that fills K masks in T steps, the most confident first, and then refines them.

    Args:
        drafter: over the target's vocabulary.
        draft_tokens: K, default its training's block.
        steps: T, of the filling.
        rounds: R refining rounds; 0 = none. Round r masks the least confident share cos(π/2·r/R) of the positions, at least one
            and never all (the paper's annealed rate).

    Raises:
        UserError: a number out of range.
    """

    name = "tolerator"

    def __init__(
        self, drafter: DiffusionDrafter, draft_tokens: int | None = None, steps: int = 1, rounds: int = 2
    ) -> None:
        check_range("draft_tokens", draft_tokens, 1)
        check_range("steps", steps, 1, None)
        check_range("rounds", rounds, 0, None)
        self.drafter, self.steps, self.rounds = drafter.eval(), steps, rounds
        self.draft_tokens = self.draft_nodes = draft_tokens or drafter.config.block_size

    def law(self, sampling: Sampling) -> Law:
        return "point"

    def start(self, request: Request) -> ToleratorSession:
        return ToleratorSession(self, request)


class ToleratorSession(DiffusionSession):
    """One request's drafts."""

    def __init__(self, proposer: ToleratorDrafter, request: Request) -> None:
        super().__init__(proposer.drafter, request, proposer.draft_tokens)
        self.proposer = proposer

    def propose(self, k: int) -> Proposal:
        rounds = self.proposer.rounds
        block_K = self.masks(k)
        count = min(self.proposer.steps, k)
        sure_K = torch.zeros(k, dtype=torch.float32, device=block_K.device)
        for step in range(count):
            left = int(self.masked(block_K).sum())
            self._decode(block_K, sure_K, math.ceil(left / (count - step)))
        for r in range(1, rounds + 1) if k > 1 else ():
            part = max(1, min(k - 1, round(k * math.cos(math.pi / 2 * r / rounds))))
            block_K[sure_K.topk(part, largest=False).indices] = self.drafter.mask_id
            self._decode(block_K, sure_K, part)
        return Proposal(block_K, "point")

    def _decode(self, block_K: Tensor, sure_K: Tensor, count: int) -> None:
        """Fill the `count` masked positions where q is most peaked with the argmax, in place; record how peaked it is."""
        logits_KV = self.context.denoise(block_K)
        peak_K = logits_KV.softmax(-1).amax(-1)
        at = peak_K.masked_fill(~self.masked(block_K), -1.0).topk(count).indices.sort().values
        sure_K[at] = peak_K[at]
        block_K[at] = best(logits_KV[at], self.request.sampling, self.before(at), overwrite=True)
