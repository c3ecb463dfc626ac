"""Processors and stopping criteria as users of `generate` write them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria


class NoRepeats(LogitsProcessor):
    """A user's own: the last two tokens may not come again."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.scatter(1, input_ids[:, -2:], -torch.inf)


class EndsAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class RowEnds(StoppingCriteria):
    """The text that begins with 5 ends at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return (input_ids[:, 0] == 5) & (input_ids.shape[1] >= self.length)


class Sure(StoppingCriteria):
    """Ends where the last token was far above the others: needs scores."""

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        best = scores[-1].topk(2).values
        return (best[:, 0] - best[:, 1] > 0.15) & (len(scores) > 3)


class Ticks(StoppingCriteria):
    """A clock that ticks when it is looked at: ends everything after so many looks."""

    def __init__(self, ticks: int) -> None:
        self.left = ticks

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        self.left -= 1
        return torch.full((len(input_ids),), self.left < 0)


class Impossible(LogitsProcessor):
    """From a length on no token is left."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] > 8 else scores
