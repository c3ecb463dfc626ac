"""What a text and its drafts hold, for the processors: penalties, banned tokens, minimum length.
`sampling.py` applies them, and temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import lru_cache

import torch
from torch import Tensor

from decode.speculation.sampling import NOTHING, ProcessorState
from decode.speculation.settings import Sampling
from decode.speculation.tree import ancestors, depths


class History:
    """Which tokens one request's text holds, as far as the active processors need it.

    Args:
        prompt: counts for the repetition penalty, not for presence penalty and minimum length.
        eos_ids: the tokens that the minimum length bars.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device,
    ) -> None:
        def make_mask(tokens: Iterable[int]) -> Tensor:
            out_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            out_V[torch.tensor(list(tokens), dtype=torch.int64, device=device)] = True
            return out_V

        self.count, self.min_new_tokens = 0, sampling.min_new_tokens
        self.seen_V = make_mask(prompt) if sampling.repetition_penalty != 1 else None
        self.written_V = make_mask(()) if sampling.presence_penalty != 0 else None
        self.banned_V = make_mask(sampling.banned) if sampling.banned else None
        self.min_length_mask_V = (
            make_mask((*sampling.banned, *eos_ids)) if self.min_new_tokens else None
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self.count += len(tokens)
        for held_V in (self.seen_V, self.written_V):
            if held_V is not None:
                held_V[torch.tensor(tokens, dtype=torch.int64, device=held_V.device)] = True

    def fork(self) -> History:
        """An independent copy."""
        return deepcopy(self)

    def rows(self, tokens_K: Tensor, parents: tuple[int, ...]) -> ProcessorState:
        """The state at each of the K + 1 nodes of a round: the text, and the drafts on the node's
        path."""
        depth = (0, *depths(parents))
        seen = self._with(self.seen_V, tokens_K, parents)
        return self._of(seen, self._with(self.written_V, tokens_K, parents), depth)

    def ahead(self, first: int, count: int) -> ProcessorState:
        """The state at `count` positions, the first of them `first` positions ahead, for drafts
        that are drawn without looking at those left of them."""
        return self._of(self.seen_V, self.written_V, range(first, first + count))

    def _of(
        self, seen: Tensor | None, written: Tensor | None, depth: Sequence[int]
    ) -> ProcessorState:
        barred = self._banned_mask(depth)
        if seen is None and written is None and barred is None:
            return NOTHING
        return ProcessorState(seen, written, barred)

    def _banned_mask(self, depth: Sequence[int]) -> Tensor | None:
        if self.min_length_mask_V is None or self.count + min(depth) >= self.min_new_tokens:
            return self.banned_V
        if self.count + max(depth) < self.min_new_tokens:
            return self.min_length_mask_V
        early_V, later_V = self.min_length_mask_V, self.banned_V
        if later_V is None:
            later_V = torch.zeros_like(early_V)
        barred = [self.count + d < self.min_new_tokens for d in depth]
        return torch.stack([early_V if early else later_V for early in barred])

    @staticmethod
    def _with(held_V: Tensor | None, tokens_K: Tensor, parents: tuple[int, ...]) -> Tensor | None:
        if held_V is None or not parents:
            return held_V
        row, draft = _on_paths(parents)
        held_MV = held_V.repeat(len(parents) + 1, 1)
        held_MV[row.to(held_V.device), tokens_K[draft.to(held_V.device)]] = True
        return held_MV


@lru_cache(maxsize=512)
def _on_paths(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """All pairs of a node and a drafted token on its path, as two index tensors on the CPU."""
    row, draft = ancestors(parents)[:, 1:].nonzero(as_tuple=True)
    return row, draft
