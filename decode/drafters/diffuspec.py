"""DiffuSpec (arXiv 2510.02358): a standalone diffusion drafter's one-pass distributions are searched for the best path from left
to right, and the draft is as long as recent rounds suggest. No training.

Path search (CPS): decode/drafters/diffuspec_search.py, with an n-gram model of prompt, output and perhaps a corpus as the causal
model. Adaptive draft length (ADL): `decode.drafters.controllers.AdaptiveLength`. Either can be switched off. The drafts are
searched for, not drawn: law `point`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from align.models.standalone import DiffusionDrafter
from align.target.model import TargetOutput
from decode.drafters.base import Request, check_range
from decode.drafters.controllers import AdaptiveLength, adaptive_range
from decode.drafters.diffusion import DiffusionSession
from decode.drafters.diffuspec_search import NgramModel, best_path, columns
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling, apply_penalties, probs


class DiffuSpecDrafter:
    """DiffuSpec with a trained standalone drafter.

    Args:
        drafter: over the target's vocabulary.
        draft_tokens: the most tokens that its network drafts well; default its training's block. `shortest` and `longest` are
            limited to it.
        path_search: CPS; without it each position's most probable token.
        adaptive_length: ADL; without it always `longest`.
        corpus: texts that the n-gram model has read before any request, as the target's tokens
            (`decode.drafters.corpus.read_corpus`).

    Raises:
        UserError: a number out of its range.
    """

    name = "diffuspec"
    mass, candidates = 0.8, 15
    """A position's candidates are the most probable tokens with so much of q, at most so many."""
    beam = 3
    """Paths kept at each position."""
    weight = 0.5
    """λ, of ln q against the n-gram model's ln p."""
    smoothing = 0.5
    """Of `AdaptiveLength`; 20 to 30 tokens by 10 as published, in the same proportions for networks of shorter blocks."""

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

    def law(self, sampling: Sampling) -> Law:
        return "point"

    def start(self, request: Request) -> DiffuSpecSession:
        return DiffuSpecSession(self, request)


class DiffuSpecSession(DiffusionSession):
    """One request's drafts."""

    rewinds = False
    """The n-gram model cannot unread text."""

    def __init__(self, proposer: DiffuSpecDrafter, request: Request) -> None:
        super().__init__(proposer.drafter, request, proposer.draft_tokens)
        self.proposer = proposer
        self.ngrams = proposer.ngrams.continued()
        self.length = AdaptiveLength(proposer.shortest, proposer.longest, proposer.growth, proposer.smoothing)
        self.generated: int | None = None  # of a draft that was not verified yet

    def observe(self, output: TargetOutput, kept: int) -> None:
        """After a verification: `kept` − 1 tokens of the draft were accepted."""
        if self.generated is not None and self.proposer.adaptive_length:
            self.length.update(self.generated, kept - 1)
        self.generated = None

    def propose(self, k: int) -> Proposal | None:
        if self.proposer.path_search:
            self.ngrams.extend(self.request.tokens[len(self.context.tokens) :])
        q_KV = self._q(min(k, self.length.tokens))
        path = self._search(q_KV) if self.proposer.path_search else q_KV.argmax(-1).tolist()
        ends = self.request.target.eos_ids
        before_end = list(takewhile(lambda token: token not in ends, path))
        self.generated = len(before_end)
        tokens = path[: len(before_end) + 1]  # nothing follows an end of sequence
        return Proposal(torch.tensor(tokens, device=self.context.device), "point") if tokens else None

    def _q(self, k: int) -> Tensor:
        """The network's distributions at the next k positions, (k, V), processed like the target's. At temperature 0: those of
        temperature 1 without top-k, top-p and min-p, as the search compares probabilities."""
        sampling, before = self.request.sampling, self.request.history.ahead(0, k)
        logits_KV = self.context.denoise(self.masks(k))
        if sampling.greedy:
            return apply_penalties(logits_KV, sampling, before, overwrite=True).softmax(-1)
        return probs(logits_KV, sampling, before, overwrite=True)

    def _search(self, q_KV: Tensor) -> list[int]:
        drafter, ends = self.proposer, self.request.target.eos_ids
        lattice = columns(q_KV, drafter.mass, drafter.candidates, ends)
        last = self.request.tokens[-self.ngrams.order :]

        def reader(path: tuple[int, ...], tokens: Sequence[int]) -> list[float]:
            return self.ngrams.log_probs([*last, *path], tokens)

        return best_path(lattice, reader, drafter.weight, drafter.beam, ends)
