"""DiffuSpec (arXiv 2510.02358): a standalone diffusion drafter's one-pass distributions are
searched for the best path from left to right, and the draft is as long as recent rounds suggest. No
training.

Path search (CPS): decode/proposers/diffuspec_search.py, with an n-gram model of prompt, output and
perhaps a corpus as the causal model. Adaptive draft length (ADL):
`decode.proposers.controllers.AdaptiveLength`. The drafts are searched for, not drawn: law `point`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from decode.proposers.base import Drafter, Request, check_range
from decode.proposers.controllers import AdaptiveLength, adaptive_range
from decode.proposers.diffusion import DiffusionSession
from decode.proposers.diffuspec_search import NgramModel, find_best_path, find_candidates
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import apply_penalties, probs
from specalign.lm.model import TargetOutput
from specalign.models.standalone import DiffusionDrafter


class DiffuSpecDrafter(Drafter):
    """DiffuSpec with a trained standalone drafter.

    Args:
        drafter: over the target's vocabulary.
        draft_tokens: the most tokens that its network drafts well; default its training's block.
        path_search: CPS; without it each position's most probable token.
        adaptive_length: ADL; without it always `longest`.
        corpus: texts that the n-gram model reads first, as the target's tokens.
    """

    name = "diffuspec"
    mass, candidates = 0.8, 15
    """A position's candidates: the most probable tokens with this share of q, at most that many."""
    beam = 3
    """Paths kept at each position."""
    weight = 0.5
    """λ, of ln q against the n-gram model's ln p."""
    smoothing = 0.5
    """Of `AdaptiveLength`; 20 to 30 tokens by 10 as published, in proportion for shorter blocks."""

    def __init__(
        self,
        drafter: DiffusionDrafter,
        draft_tokens: int | None = None,
        *,
        path_search: bool = True,
        adaptive_length: bool = True,
        corpus: Iterable[Sequence[int]] = (),
    ) -> None:
        most = drafter.config.block_size if draft_tokens is None else draft_tokens
        check_range("draft_tokens", most, 1, None)
        self.shortest, self.longest, self.growth = adaptive_range(min(most, 30))
        self.drafter = drafter.eval()
        self.path_search, self.adaptive_length = path_search, adaptive_length
        self.draft_tokens = self.draft_nodes = self.longest
        self.ngrams = NgramModel(drafter.config.vocab_size)
        self.ngrams.read(corpus)

    def start(self, request: Request) -> DiffuSpecSession:
        return DiffuSpecSession(self, request)


class DiffuSpecSession(DiffusionSession[DiffuSpecDrafter]):
    """One request's drafts."""

    rewinds = False
    """The n-gram model cannot unread text."""

    def __init__(self, proposer: DiffuSpecDrafter, request: Request) -> None:
        super().__init__(proposer, request)
        self.ngrams = proposer.ngrams.continue_text()
        self.length = AdaptiveLength(
            proposer.shortest, proposer.longest, proposer.growth, proposer.smoothing
        )
        self.generated: int | None = None  # tokens before an end of sequence of an unverified draft

    def observe(self, output: TargetOutput, kept: int) -> None:
        if self.generated is not None and self.proposer.adaptive_length:
            self.length.update(self.generated, kept - 1)
        self.generated = None

    def propose(self, k: int) -> Proposal:
        search, ends = self.proposer.path_search, self.request.target.eos_ids
        if search:
            self.ngrams.extend(self.request.tokens[len(self.context.tokens) :])
        q_KV = self._compute_q(min(k, self.length.tokens))
        path = self._search(q_KV) if search else q_KV.argmax(-1).tolist()
        self.generated = next((i for i, token in enumerate(path) if token in ends), len(path))
        # nothing follows an end of sequence
        return Proposal(
            torch.tensor(path[: self.generated + 1], device=self.context.device), "point"
        )

    def _compute_q(self, k: int) -> Tensor:
        """The processed distributions at the next k positions, (k, V). At temperature 0 those of
        temperature 1 without top-k, top-p and min-p, as the search compares probabilities."""
        sampling, before = self.request.sampling, self.request.history.ahead(0, k)
        logits_KV = self.context.denoise(self.append_masks(k))
        if sampling.greedy:
            return apply_penalties(logits_KV, sampling, before, overwrite=True).softmax(-1)
        return probs(logits_KV, sampling, before, overwrite=True)

    def _search(self, q_KV: Tensor) -> list[int]:
        proposer, ends = self.proposer, self.request.target.eos_ids
        lattice = find_candidates(q_KV, proposer.mass, proposer.candidates, ends)
        last = self.request.tokens[-self.ngrams.order :]

        def score(path: tuple[int, ...], tokens: Sequence[int]) -> list[float]:
            return self.ngrams.log_probs([*last, *path], tokens)

        return find_best_path(lattice, score, proposer.weight, proposer.beam, ends)
