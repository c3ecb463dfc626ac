"""Hierarchical speculative decoding (arXiv 2510.19705): a middle model M decodes speculatively with
its own cheaper drafter, and M's output is the draft for the target.

M's speculation is lossless, so its k tokens are draws from M whatever drafted for it: law `causal`
with q_i = M(· | text, x_<i), the row that verified them; at temperature 0 M's argmax, law `point`.
M always decodes exactly k tokens, so their number does not depend on their values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decode.proposers.autoregressive import CausalContext
from decode.proposers.base import DraftSession, Proposer, Request
from decode.speculation.proposal import NO_DRAFTS, DraftProbs, Law, Proposal
from decode.speculation.rounds import Round, outcome_of, verify_rounds
from decode.speculation.sampling import probs
from decode.speculation.settings import Sampling
from decode.speculation.verifiers import Outcome, choose, run_verifier
from specalign.common.errors import UserError
from specalign.lm.model import Target


class HierarchicalSession(DraftSession):
    """`middle` is M's own request: the text followed by M's tokens of this round."""

    proposer: HierarchicalProposer

    def __init__(self, proposer: HierarchicalProposer, request: Request) -> None:
        super().__init__(proposer, request)
        model, target = proposer.model, request.target
        if model.device != target.device:
            devices = f"drafter {model.spec!r} is on {model.device}, target on {target.device}"
            raise UserError(f"{devices}: a hierarchical drafter needs the same device")
        self.law: Law = request.law(proposer)
        capacity = request.cache.capacity + proposer.inner.draft_tokens
        self.context = CausalContext(model, target, capacity)
        self.middle = replace(
            request,
            target=model,
            tokens=list(request.tokens),
            cache=self.context.cache,
            history=request.history.fork(),
        )
        self.inner = proposer.inner.start(self.middle)

    def propose(self, k: int) -> Proposal | None:
        # the last draft is not read
        k = min(k, self.proposer.model.context_limit + 1 - len(self.request.tokens))
        if k < 1:
            return None
        self._reset_text()
        first, rows = len(self.middle.tokens), list[Tensor]()
        while (left := first + k - len(self.middle.tokens)) > 0:
            rows.append(self._decode_round(left))
        tokens_K = torch.tensor(self.middle.tokens[first:], device=self.proposer.model.device)
        q = None if self.law == "point" else DraftProbs(torch.cat(rows))
        return Proposal(tokens_K, self.law, q)

    def _reset_text(self) -> None:
        """Reset M's text to the committed one."""
        self.middle.tokens[:] = self.request.tokens
        self.middle.history = self.request.history.fork()

    @torch.no_grad()
    def _decode_round(self, left: int) -> Tensor:
        """One forward pass of M, which adds 1 to `left` tokens; returns the rows that they were
        drawn from, (R, V)."""
        middle = self.middle
        # a round adds its accepted drafts and one more token
        most = min(self.proposer.inner.draft_tokens, left - 1)
        draft = (self.inner.propose(most) if most > 0 else None) or NO_DRAFTS
        draft = draft.cut(most)
        unread = self.context.follow(middle.tokens)
        outcome, p_MV = self._verify(self.context.read(unread, draft.tokens_K.tolist()), draft)
        tokens = [*outcome.accepted, outcome.following]
        middle.tokens.extend(tokens)
        middle.history.extend(tokens)
        return p_MV[outcome.rows]

    def _verify(self, logits_MV: Tensor, draft: Proposal) -> tuple[Outcome, Tensor]:
        """M's verification of the drafts, and its p at every node (for law `point` the logits)."""
        middle, sampling = self.middle, self.middle.sampling
        before = middle.history.rows(draft.tokens_K, draft.tree)
        if self.law == "point":
            verifier, first = "greedy" if sampling.greedy else "gumbel", len(middle.tokens)
            draws = (middle.generator, None, middle.noise, first)
            one = Round(logits_MV, draft, verifier, sampling, before, *draws)
            return verify_rounds([one])[0], logits_MV
        p_MV = probs(logits_MV, sampling, before, overwrite=True)
        verifier = choose(draft.law, sampling.temperature)
        verdict = run_verifier(verifier, [draft], p_MV[None], [middle.generator])
        return outcome_of(draft, *verdict), p_MV

    def close(self) -> None:
        self.inner.close()


class HierarchicalProposer(Proposer):
    """A causal language model M with its own cheaper drafter, which drafts chains for M from the
    text alone, also after the text was rewound. `start` raises UserError for another vocabulary or
    device than the target's."""

    in_rounds = True
    session = HierarchicalSession

    def __init__(self, model: Target, inner: Proposer, draft_tokens: int) -> None:
        self.model, self.inner, self.draft_tokens = model, inner, draft_tokens
        self.name = f"hierarchical+{inner.name}"

    def law(self, sampling: Sampling) -> Law:
        return "point" if sampling.greedy else "causal"
