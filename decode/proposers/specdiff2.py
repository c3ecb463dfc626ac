"""SpecDiff-2 (arXiv 2511.00606): S drafts drawn from one step's marginals at a draft temperature,
verified in one forward pass.

Merged where they share a prefix they have law `point`: the target's p selects the draft to follow
(verifier `self_selection`, as published), or all are followed at once (`point_mass`). Or each keeps
its q: S i.i.d. chains for recursive rejection and traversal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decode.proposers.diffusion import DiffusionSession, StandaloneProposer
from decode.speculation.proposal import DraftProbs, Law, Proposal
from decode.speculation.sampling import draw, probs
from decode.speculation.settings import MOST_NODES, Sampling
from decode.speculation.tree_drafts import merge_chains, prefix_tree
from specalign.common.errors import UserError


class SpecDiff2Session(DiffusionSession):
    proposer: SpecDiff2Proposer

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


@dataclass(eq=False)
class SpecDiff2Proposer(StandaloneProposer):
    """S drafts per round from a standalone drafter over the target's vocabulary.

    Args:
        draft_tokens: K, default its training's block.
        candidates: S.
        draft_temperature: None = the target's, 1 where that is 0. The paper's is about 1.5.
        keep_q: above temperature 0 keep the drafts separate, each with its q.
    """

    name = "candidates"
    session = SpecDiff2Session
    candidates: int = 8
    draft_temperature: float | None = None
    keep_q: bool = False

    def __post_init__(self, draft_tokens: int | None) -> None:
        super().__post_init__(draft_tokens)
        self.draft_nodes = self.candidates * self.draft_tokens
        if self.draft_nodes > MOST_NODES:
            most, size = MOST_NODES // self.draft_tokens, self.draft_tokens
            raise UserError(f"candidates={self.candidates}: at most {most} with {size} tokens each")

    def law(self, sampling: Sampling) -> Law:
        return "independent" if self.keep_q and not sampling.greedy else "point"
