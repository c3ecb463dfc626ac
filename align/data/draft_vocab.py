"""The draft vocabulary: the tokens that the target uses most, and how much of its text they cover."""

from __future__ import annotations

import torch
from torch import Tensor

from align.data.shards import Samples
from align.target.model import Target


def frequent_tokens(samples: Samples, target: Target, size: int) -> Tensor | None:
    """The `size` tokens that answers use most, ascending ids, end-of-sequence always among them; None = all of V."""
    if size <= 0 or size >= target.vocab_size:
        return None
    counts = torch.zeros(target.vocab_size, dtype=torch.float64)
    for i in range(len(samples)):
        answer = samples[i][int(samples.answer_start[i]) :]
        counts += torch.bincount(answer, minlength=target.vocab_size).double()
    counts[list(target.eos_ids)] += 1e12
    # equal counts fall to the smaller id, which byte-pair vocabularies give to the commoner merge
    counts -= torch.arange(target.vocab_size, dtype=torch.float64) * 1e-6
    return counts.topk(size).indices.sort().values


def coverage(samples: Samples, draft_vocab: Tensor | None, target: Target) -> float:
    """Share of answer tokens that the draft vocabulary can propose."""
    if draft_vocab is None:
        return 1.0
    allowed = torch.zeros(target.vocab_size, dtype=torch.bool)
    allowed[draft_vocab] = True
    hits = [allowed[samples[i][int(samples.answer_start[i]) :]] for i in range(len(samples))]
    return float(torch.cat(hits).float().mean())
