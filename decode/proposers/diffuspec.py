"""DiffuSpec (arXiv 2510.02358): a standalone diffusion drafter's one-pass distributions are
searched for the best path, and the draft is as long as recent rounds suggest. No training.

The path search (CPS, section 4.2) takes a few candidates per position; a beam search finds the path
with the best mixture of q and an n-gram model of prompt, output and perhaps a corpus. Adaptive
draft length (ADL): `decode.proposers.adaptive.AdaptiveLength`. Law `point`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import InitVar, dataclass

from torch import Tensor

from decode.proposers.adaptive import AdaptiveLength
from decode.proposers.base import Request
from decode.proposers.diffusion import DiffusionSession, StandaloneProposer
from decode.speculation.proposal import Proposal, point_proposal
from decode.speculation.sampling import apply_penalties, probs
from specalign.lm.model import TargetOutput

Column = list[tuple[int, float]]
"""A position's candidates: token and ln q, the most probable first."""
PathScore = Callable[[tuple[int, ...], Sequence[int]], Sequence[float]]
"""(path so far, tokens) → ln p of each of them after it."""
MASS, CANDIDATES = 0.8, 15
"""A position's candidates: the most probable tokens with this share of q, at most that many."""
BEAM = 3
"""Paths kept at each position."""
WEIGHT = 0.5
"""λ, of ln q against the n-gram model's ln p."""
LONGEST = 30


class DiffuSpecSession(DiffusionSession):
    proposer: DiffuSpecProposer

    def __init__(self, proposer: DiffuSpecProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.ngrams = NgramModel(proposer.ngrams.vocab_size, base=proposer.ngrams)
        self.length = AdaptiveLength(proposer.draft_tokens)
        self.generated: int | None = None  # tokens before an end of sequence of an unverified draft

    def observe(self, output: TargetOutput, kept: int) -> None:
        if self.generated is not None:
            self.length.observe(self.generated, kept - 1)
        self.generated = None

    def propose(self, k: int) -> Proposal:
        tokens, ends = self.request.tokens, self.request.target.eos_ids
        self.ngrams.extend(tokens[len(self.context.tokens) :])
        last = tokens[-self.ngrams.order :]

        def score(path: tuple[int, ...], tokens: Sequence[int]) -> list[float]:
            return self.ngrams.log_probs([*last, *path], tokens)

        q_KV = self._compute_q(min(k, self.length.tokens))
        lattice = find_candidates(q_KV, MASS, CANDIDATES, ends)
        path = find_best_path(lattice, score, WEIGHT, BEAM, ends)
        self.generated = next((i for i, token in enumerate(path) if token in ends), len(path))
        # nothing follows an end of sequence
        return point_proposal(path[: self.generated + 1], self.context.device)

    def _compute_q(self, k: int) -> Tensor:
        """The processed distributions at the next k positions, (k, V). At temperature 0 those of
        temperature 1 without truncation, as the search compares probabilities."""
        sampling, before = self.request.sampling, self.request.history.ahead(0, k)
        logits_KV = self.context.denoise(self.append_masks(k))
        if sampling.greedy:
            return apply_penalties(logits_KV, sampling, before, overwrite=True).softmax(-1)
        return probs(logits_KV, sampling, before, overwrite=True)


@dataclass(eq=False)
class DiffuSpecProposer(StandaloneProposer):
    """DiffuSpec with a trained standalone drafter over the target's vocabulary.

    Args:
        draft_tokens: the most tokens that its network drafts well; default its training's block.
        corpus: texts that the n-gram model reads first, as the target's tokens.
    """

    name = "diffuspec"
    session = DiffuSpecSession
    corpus: InitVar[Iterable[Sequence[int]]] = ()

    def __post_init__(self, draft_tokens: int | None, corpus: Iterable[Sequence[int]]) -> None:
        super().__post_init__(draft_tokens)
        self.draft_tokens = self.draft_nodes = min(self.draft_tokens, LONGEST)
        self.ngrams = NgramModel(self.drafter.config.vocab_size)
        for text in corpus:
            self.ngrams.read(text)


def find_candidates(q_KV: Tensor, mass: float, most: int, ends: Collection[int]) -> list[Column]:
    """Candidates (eq. 7): at each position the smallest set of most probable tokens with `mass` of
    q, at most `most`; and the most probable end of sequence. None has probability 0."""
    top = q_KV.double().topk(min(most, q_KV.shape[1]), dim=-1)
    before_KM = top.values.cumsum(-1).roll(1, -1)
    before_KM[:, 0] = 0.0
    kept_KM = (before_KM < mass) & (top.values > 0)
    rows = zip(kept_KM.tolist(), top.indices.tolist(), top.values.log().tolist(), strict=True)
    lattice = [[(t, x) for keep, t, x in zip(*row, strict=True) if keep] for row in rows]
    if ends:
        ids = sorted(ends)
        likeliest = q_KV[:, ids].double().max(-1)
        for column, q, at in zip(
            lattice, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True
        ):
            if q > 0 and not any(token in ends for token, _ in column):
                column.append((ids[at], math.log(q)))
    return lattice


def find_best_path(
    lattice: Sequence[Column], score: PathScore, weight: float, beam: int, ends: Collection[int]
) -> list[int]:
    """One token of each column, up to and with the first end of sequence.

    Score (eq. 8): S = Σ_i weight·ln q_i + (1 − weight)·ln p_i. The `beam` best paths are continued.
    Paths of one length are compared by S, at the end those of different lengths by S per token: S
    is negative, so it would favour early ends.
    """
    open_paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for column in lattice:
        tokens = [token for token, _ in column]
        found = [
            (total + weight * log_q + (1 - weight) * log_p, (*path, token))
            for total, path in open_paths
            for (token, log_q), log_p in zip(column, score(path, tokens), strict=True)
        ]
        if not found:
            break
        found.sort(key=lambda x: -x[0])
        ended += [x for x in found[:beam] if x[1][-1] in ends]
        open_paths = [x for x in found[:beam] if x[1][-1] not in ends]
    best = max([*open_paths, *ended], key=lambda x: x[0] / max(1, len(x[1])))
    return list(best[1])


class NgramModel:
    """Counts of all n-grams of up to `order` tokens, each order smoothed with the next lower one
    (Dirichlet prior worth `strength` observations), down to the uniform distribution. `base`: a
    model whose counts are added; it is not changed."""

    def __init__(
        self, vocab_size: int, order: int = 3, strength: float = 1.0, base: NgramModel | None = None
    ) -> None:
        self.vocab_size, self.order, self.strength, self.base = vocab_size, order, strength, base
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.followed: Counter[tuple[int, ...]] = Counter()
        """How many tokens followed each context."""
        self._tail: list[int] = []

    def read(self, text: Sequence[int]) -> None:
        """Count a separate text."""
        self._tail = []
        self.extend(text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text and count them."""
        for token in tokens:
            for first in range(len(self._tail) + 1):
                context = tuple(self._tail[first:])
                self.counts[(*context, token)] += 1
                self.followed[context] += 1
            self._tail.append(token)
            del self._tail[: len(self._tail) - (self.order - 1)]

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """ln p of each of the tokens after a context; its last `order` − 1 tokens matter."""
        models = [self] if self.base is None else [self, self.base]
        p = [1 / self.vocab_size] * len(tokens)
        for n in range(min(self.order - 1, len(context)) + 1):
            suffix = tuple(context[len(context) - n :])
            followed = sum(model.followed[suffix] for model in models)
            if not followed:  # nor was any longer one
                break
            total = followed + self.strength
            counts = [sum(model.counts[(*suffix, t)] for model in models) for t in tokens]
            p = [(c + self.strength * x) / total for c, x in zip(counts, p, strict=True)]
        return [math.log(x) for x in p]
