"""The draft vocabulary: the tokens that the target uses most, and how much of its text they cover."""

from __future__ import annotations

import torch
from torch import Tensor

from align.data.shards import Texts
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
    """How often each token stands in the answers, (V,) fp64."""
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for i in range(len(samples)):
        tokens = samples[i][int(samples.answer_start[i]) :]
        counts.index_add_(0, tokens, torch.ones(len(tokens), dtype=torch.float64))
    return counts


def coverage(samples: Texts, draft_vocab: Tensor | None, target: Target) -> float:
    """Share of answer tokens that the draft vocabulary can propose."""
    if draft_vocab is None:
        return 1.0
    allowed = torch.zeros(target.vocab_size, dtype=torch.bool)
    allowed[draft_vocab] = True
    hits = [allowed[samples[i][int(samples.answer_start[i]) :]] for i in range(len(samples))]
    return float(torch.cat(hits).float().mean())
