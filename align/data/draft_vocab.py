"""The draft vocabulary: the tokens that the target uses most, and how much of its text they
cover."""

from itertools import pairwise

import torch
from torch import Tensor

from specalign.lm.model import Target
from specalign.rows.shards import ShardSamples


def frequent_tokens(
    samples: ShardSamples, target: Target, size: int, text: ShardSamples | None = None
) -> Tensor | None:
    """The `size` most frequent tokens of answers, end-of-sequence always included, in ascending
    order; None = all of V. `text`: other training text; it weighs as much as the answers."""
    if size <= 0 or size >= target.vocab_size:
        return None
    counts = _count_tokens(samples, target.vocab_size)
    if text is not None:
        other = _count_tokens(text, target.vocab_size)
        counts += other * (counts.sum() / other.sum().clamp_min(1))
    counts[list(target.eos_ids)] += 1e12
    # ties go to the smaller id, which byte-pair vocabularies give to the more common merge
    counts -= torch.arange(target.vocab_size, dtype=torch.float64) * 1e-6
    return counts.topk(size).indices.sort().values


def coverage(samples: ShardSamples, draft_vocab: Tensor | None, target: Target) -> float:
    """The share of answer tokens that the draft vocabulary can propose."""
    if draft_vocab is None:
        return 1.0
    counts = _count_tokens(samples, target.vocab_size)
    return float(counts[draft_vocab.cpu()].sum() / counts.sum())


def _count_tokens(samples: ShardSamples, vocabulary: int) -> Tensor:
    """How often each token occurs in the answers, (V,) float64, exact."""
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    chosen_M = samples.chosen_M.sort().values
    bounds = torch.searchsorted(chosen_M, samples.first_S).tolist()
    for number, (start, end) in enumerate(pairwise(bounds)):
        shard = samples.shards[number]
        chosen = chosen_M[start:end] - samples.first_S[number]
        # +1 where an answer begins and -1 where it ends: the running sum is positive inside
        edges = torch.zeros(len(shard.tokens) + 1, dtype=torch.int64)
        begin = shard.offsets[chosen] + shard.answer_start[chosen]
        edges.index_add_(0, begin, torch.ones_like(chosen))
        edges.index_add_(0, shard.offsets[chosen + 1], -torch.ones_like(chosen))
        answers = shard.tokens[edges.cumsum(0)[:-1] > 0].long()
        counts += torch.bincount(answers, minlength=vocabulary)
    return counts
