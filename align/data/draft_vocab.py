"""The draft vocabulary: the tokens that the target uses most, and how much of its text they cover."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from align.data.shards import Samples, Texts
from align.target.model import Target


def frequent_tokens(samples: Texts, target: Target, size: int, text: Texts | None = None) -> Tensor | None:
    """The `size` tokens that answers use most, ascending ids, end-of-sequence always among them; None = all of V.

    `text`: other text that is trained on; it has as much say as the answers.
    """
    if size <= 0 or size >= target.vocab_size:
        return None
    counts = _counts(samples, target.vocab_size)
    if text is not None:
        other = _counts(text, target.vocab_size)
        counts += other * (counts.sum() / other.sum().clamp_min(1))
    counts[list(target.eos_ids)] += 1e12
    # equal counts fall to the smaller id, which byte-pair vocabularies give to the commoner merge
    counts -= torch.arange(target.vocab_size, dtype=torch.float64) * 1e-6
    return counts.topk(size).indices.sort().values


def _counts(samples: Texts, vocabulary: int) -> Tensor:
    """How often each token stands in the answers, (V,) fp64, exact."""
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for answers in _answers(samples):
        counts += torch.bincount(answers, minlength=vocabulary)
    return counts


def _answers(samples: Texts) -> Iterator[Tensor]:
    """The answers' tokens, a shard at a time and in the shards' order."""
    if isinstance(samples, Samples):
        yield _answers_of(samples, torch.arange(len(samples)))
        return
    chosen, first = samples.chosen_M.sort().values, samples.about.first_S
    bounds = torch.searchsorted(chosen, first).tolist()
    for shard, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            yield _answers_of(samples.shards[shard], chosen[start:end] - first[shard])


def _answers_of(samples: Samples, chosen: Tensor) -> Tensor:
    begin, end = samples.offsets[chosen] + samples.answer_start[chosen], samples.offsets[chosen + 1]
    edges = torch.zeros(len(samples.tokens) + 1, dtype=torch.int64)
    edges.index_add_(0, begin, torch.ones_like(begin)).index_add_(0, end, -torch.ones_like(end))
    return samples.tokens[edges.cumsum(0)[:-1] > 0].long()


def coverage(samples: Texts, draft_vocab: Tensor | None, target: Target) -> float:
    """Share of answer tokens that the draft vocabulary can propose."""
    if draft_vocab is None:
        return 1.0
    counts = _counts(samples, target.vocab_size)
    return float(counts[draft_vocab.cpu()].sum() / counts.sum())
