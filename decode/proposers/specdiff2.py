"""SpecDiff-2 (arXiv 2511.00606): S drafts drawn from one step's marginals at a draft temperature,
verified in one call.

Merged where they share a prefix they have law `point`: the target's p then selects the draft to
follow (verifier `self_selection`, as published), or all are followed at once (`point_mass`: never
fewer tokens). Or each keeps its q: S i.i.d. chains for recursive rejection and traversal.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from decode.proposers.base import Request, check_range
from decode.proposers.diffusion import DiffusionSession
from decode.speculation.proposal import DraftProbs, Law, Proposal
from decode.speculation.sampling import Sampling, draw, probs
from decode.speculation.tree import MOST_NODES
from decode.speculation.tree_drafts import merge_chains, prefix_tree
from specalign.common.errors import UserError
from specalign.models.standalone import DiffusionDrafter


class SpecDiff2Drafter:
    """S drafts per call from a standalone drafter.

    Args:
        drafter: over the target's vocabulary.
        draft_tokens: K, default its training's block.
        candidates: S.
        draft_temperature: of the draws; None = the target's, 1 where that is 0. The paper's is
            about 1.5.
        keep_q: above temperature 0 keep the drafts separate, each with its q.
    """

    name = "candidates"

    def __init__(
        self,
        drafter: DiffusionDrafter,
        draft_tokens: int | None = None,
        candidates: int = 8,
        draft_temperature: float | None = None,
        keep_q: bool = False,
    ) -> None:
        check_range("draft_tokens", draft_tokens, 1)
        self.draft_tokens = draft_tokens or drafter.config.block_size
        most = MOST_NODES // self.draft_tokens
        if not 1 <= candidates <= most:
            raise UserError(
                f"candidates={candidates}: must be 1 to {most}, with {self.draft_tokens} tokens "
                "each"
            )
        if draft_temperature is not None and not 0 < draft_temperature < math.inf:
            raise UserError(f"draft_temperature={draft_temperature}: must be above 0 and finite")
        self.drafter, self.candidates = drafter.eval(), candidates
        self.draft_temperature, self.keep_q = draft_temperature, keep_q
        self.draft_nodes = candidates * self.draft_tokens

    def law(self, sampling: Sampling) -> Law:
        return "independent" if self.keep_q and not sampling.greedy else "point"

    def start(self, request: Request) -> SpecDiff2Session:
        return SpecDiff2Session(self, request)


class SpecDiff2Session(DiffusionSession[SpecDiff2Drafter]):
    """One request\'s drafts."""

    def propose(self, k: int) -> Proposal:
        sampling, generator = self.request.sampling, self.request.generator
        temperature = self.proposer.draft_temperature or sampling.temperature or 1.0
        logits_KV = self.context.denoise(self.append_masks(k))
        before = self.before(torch.arange(k, device=logits_KV.device))
        q_KV = probs(logits_KV, replace(sampling, temperature=temperature), before, overwrite=True)
        drafts = [draw(q_KV, generator) for _ in range(self.proposer.candidates)]
        if self.law == "point":
            return prefix_tree([x.tolist() for x in drafts], q_KV.device)
        q = DraftProbs(q_KV)
        return merge_chains([Proposal(tokens_K, self.law, q) for tokens_K in drafts])
