"""Recurrent states (convolutions, linear attention, state-space layers), rolled back by snapshot
and replay.

Such a state sums up the whole text and cannot be shortened by a token. So copies are kept of what
it was before the last forward passes; rolling back returns to a copy, and the next pass runs the
tokens since then again, before its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin as StateLayer

if TYPE_CHECKING:
    from specalign.lm.cache import KVCache

States = tuple[Tensor, Tensor | None]
"""Normalised last hidden states (B, L, D) and tapped layer outputs (B, L, F, D), if any."""
SPACING = 8
"""Single tokens between two snapshots; a pass over several tokens has its own."""
MOST_REPLAYED = 16
"""With more tokens to replay they get their own pass, and a snapshot after it."""
_FIELDS = (
    "is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size",
    "conv_states", "recurrent_states",
)  # fmt: skip
_Snapshot = dict[str, dict[int, object]]
"""A layer's flags and states by name."""


def replaying(
    run: Callable[[Tensor], States], cache: KVCache, tokens_BL: Tensor, stepwise: bool
) -> States:
    """Hidden states and taps of new tokens; tokens that the recurrent states lost in a rollback run
    again before them.

    Args:
        run: tokens (B, L) → their states, through the cache.
        stepwise: after the first pass tokens run one at a time.
    """
    recurrence = cache.recurrence
    assert recurrence is not None

    def through(tokens_BL: Tensor) -> States:
        recurrence.before(tokens_BL.shape[1])
        parts = tokens_BL.split(1, dim=1) if stepwise and cache.length > 0 else [tokens_BL]
        found = [run(part) for part in parts]
        recurrence.after(tokens_BL)
        hidden = torch.cat([hidden_BLD for hidden_BLD, _ in found], dim=1)
        taps = [taps_BLFD for _, taps_BLFD in found if taps_BLFD is not None]
        return hidden, torch.cat(taps, dim=1) if taps else None

    cache.check_room(tokens_BL.shape[1])
    lost_BR, again = cache.rewind(), 0
    if lost_BR is not None and lost_BR.shape[1] > MOST_REPLAYED:
        through(lost_BR)
    elif lost_BR is not None:
        tokens_BL = torch.cat((lost_BR, tokens_BL), dim=1)
        again = lost_BR.shape[1]
    hidden_BLD, taps_BLFD = through(tokens_BL)
    return hidden_BLD[:, again:], None if taps_BLFD is None else taps_BLFD[:, again:]


class Recurrence:
    """The recurrent states of one cache. `at`: how many tokens they have seen."""

    def __init__(self, layers: Sequence[StateLayer]) -> None:
        self.layers = list(layers)
        self.at = 0
        self._tokens_BL: Tensor | None = None
        self._saved: list[tuple[int, list[_Snapshot]]] = [(0, self._copy(Tensor.clone))]

    def before(self, length: int) -> None:
        """A pass over `length` tokens follows, which may be rolled back."""
        last = self._saved[-1][0]
        if self.at > last and (length > 1 or self.at - last >= SPACING):
            new = (self.at, self._copy(Tensor.clone))
            self._saved = [self._saved[0], *self._saved[1:][-1:], new]

    def after(self, tokens_BL: Tensor) -> None:
        """The states have seen these tokens."""
        seen = self._tokens_BL
        self._tokens_BL = tokens_BL if seen is None else torch.cat((seen, tokens_BL), dim=1)
        self.at += tokens_BL.shape[1]

    def roll_back(self, length: int) -> None:
        """Only the first `length` tokens count: back to the last snapshot that has seen no more."""
        if length < self.at:
            self._saved = [saved for saved in self._saved if saved[0] <= length]
            self.at, snapshots = self._saved[-1]
            self._restore(snapshots)
            self._restore(self._copy(Tensor.clone))
        if self._tokens_BL is not None:
            self._tokens_BL = self._tokens_BL[:, :length]

    def take_lost(self) -> Tensor | None:
        """The tokens (B, R) that count and that the states have not seen, about to run again."""
        if self._tokens_BL is None or self._tokens_BL.shape[1] <= self.at:
            return None
        lost = self._tokens_BL[:, self.at :]
        self._tokens_BL = self._tokens_BL[:, : self.at]
        return lost

    def fill(self, source: Recurrence, rows: int) -> None:
        """Copy the one row of `source` to every row."""
        self._restore(source._copy(lambda t: t.expand(rows, *t.shape[1:]).clone()))
        seen = source._tokens_BL
        self._tokens_BL = None if seen is None else seen[:, : source.at].expand(rows, -1)
        self.at = source.at
        self._saved = [self._saved[0], (source.at, self._copy(Tensor.clone))]

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`."""
        self._restore(self._copy(lambda t: t.index_select(0, rows.to(t.device))))

    def _copy(self, change: Callable[[Tensor], Tensor]) -> list[_Snapshot]:
        def change_all(values: dict[int, object]) -> dict[int, object]:
            return {i: change(v) if isinstance(v, Tensor) else v for i, v in values.items()}

        return [{name: change_all(getattr(x, name)) for name in _FIELDS} for x in self.layers]

    def _restore(self, snapshots: Sequence[_Snapshot]) -> None:
        for layer, snapshot in zip(self.layers, snapshots, strict=True):
            for name, values in snapshot.items():
                setattr(layer, name, values)
