"""The state of all requests of a captured engine, on the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from decode.speculation.sampling import ProcessorState
from decode.speculation.settings import Sampling
from specalign.lm.cache import KVCache, Slots
from specalign.lm.model import Target

_COUNTERS = ("length", "last", "written", "limit", "cursor", "active")


class Shape(NamedTuple):
    """rows: requests at a time. capacity, new_tokens: cache entries and output tokens of each, at
    most. nodes: N, drafted tokens of a round."""

    rows: int
    capacity: int
    new_tokens: int
    nodes: int


class RowState:
    """Requests in rows, B of them. Its tensors keep their addresses, which graphs know.

    numbers_FB: the integers of `_COUNTERS`: cache entries in use (all of the text but its last
    token), the last token, output tokens so far and at most, uniform numbers used, and whether the
    request runs. text_BS: prompt and output; its last column is a spare one. u_BT: uniform numbers
    of drafts and rules. own_u_BT: those of the target's own tokens, by position. seen_BV,
    written_BV, banned_BV: tokens of its text, of its output, and banned ones; None where the
    settings do not look at them.
    """

    def __init__(self, target: Target, sampling: Sampling, shape: Shape) -> None:
        rows, size, device = shape.rows, target.vocab_size, target.device
        self.target, self.sampling, self.shape = target, sampling, shape
        self.cache: KVCache = target.new_cache(rows, shape.capacity)
        self.numbers_FB = torch.zeros(len(_COUNTERS), rows, dtype=torch.int64, device=device)
        self.rows_B1 = torch.arange(rows, device=device)[:, None]
        text_size = (rows, shape.capacity + 1)
        self.text_BS = torch.zeros(text_size, dtype=torch.int64, device=device)

        def make_masks(used: bool) -> Tensor | None:
            if not used:
                return None
            return torch.zeros(rows, size, dtype=torch.bool, device=device)

        self.seen_BV = make_masks(sampling.repetition_penalty != 1)
        self.written_BV = make_masks(sampling.presence_penalty != 0)
        self.banned_BV = make_masks(bool(sampling.banned or sampling.min_new_tokens))
        self.eos_V = torch.zeros(size, dtype=torch.bool, device=device)
        self.eos_V[torch.tensor(target.eos_ids, dtype=torch.int64, device=device)] = True
        # every round commits a token; it uses a number for each draft, and two for a rule
        positions = 0 if sampling.greedy else shape.new_tokens
        sizes = positions * (shape.nodes + 2), positions
        self.u_BT, self.own_u_BT = (
            torch.zeros(rows, size, dtype=torch.float64, device=device) for size in sizes
        )
        width = 4 + 5 * shape.nodes
        self.result_BX = torch.zeros(rows, width, dtype=torch.int64, device=device)

    def counter(self, name: str) -> Tensor:
        """(B,), a view."""
        return self.numbers_FB[_COUNTERS.index(name)]

    @property
    def active_B1(self) -> Tensor:
        """Bool: which rows run. The others, also while a graph is captured, must not change."""
        return self.counter("active")[:, None] > 0

    @property
    def room_B(self) -> Tensor:
        """How many drafts still fit before the last token of the output."""
        return (self.counter("limit") - self.counter("written") - 1).clamp(min=0)

    def start_row(self, row: int, tokens: list[int], limit: int) -> None:
        """A request with this text, whose last token is the first of its output, of at most
        `limit` tokens."""
        device = self.numbers_FB.device
        values = [len(tokens) - 1, tokens[-1], 1, limit, 0, 1]
        self.numbers_FB[:, row] = torch.tensor(values, device=device)
        self.text_BS[row, : len(tokens)] = torch.tensor(tokens, device=device)

    def stop_row(self, row: int) -> None:
        self.numbers_FB[:, row] = 0

    def uniform(self, at_BR: Tensor, counts_BR: Tensor) -> Tensor:
        """Uniform numbers at places after those used, (B, R); −1 where a draw does not count, so
        that no number serves two draws."""
        u_BR = self.u_BT.gather(1, self.counter("cursor")[:, None] + at_BR)
        return torch.where(counts_BR, u_BR, -1.0)

    def own_numbers(self, depth_BM: Tensor, counts_BM: Tensor) -> Tensor:
        """The numbers of the target's own tokens this far ahead of the text, (B, M); −1 where a
        node does not count."""
        at_BM = self.counter("written")[:, None] + depth_BM
        own_BM = self.own_u_BT.gather(1, at_BM.clamp(max=self.shape.new_tokens - 1))
        return torch.where(counts_BM & self.active_B1, own_BM, -1.0)

    def before(
        self, drafts_BMN: Tensor | None, tokens_BN: Tensor, depth_BM: Tensor
    ) -> ProcessorState:
        """The processors' state of M prefixes of each request, masks (B, M, V).

        drafts_BMN: which of the drafts `tokens_BN` a prefix holds; None = none of them. depth_BM:
        how many tokens it is ahead of the text.
        """
        seen, written = (
            self._held(t, drafts_BMN, tokens_BN) for t in (self.seen_BV, self.written_BV)
        )
        return ProcessorState(seen, written, self._barred(depth_BM))

    def _held(
        self, held_BV: Tensor | None, drafts_BMN: Tensor | None, tokens_BN: Tensor
    ) -> Tensor | None:
        if held_BV is None or drafts_BMN is None:
            return None if held_BV is None else held_BV[:, None]
        size = held_BV.shape[1]
        index_BMN = torch.where(drafts_BMN, tokens_BN[:, None], size)  # others: a spare column
        on_path_BMV = held_BV.new_zeros(*drafts_BMN.shape[:2], size + 1)
        on_path_BMV.scatter_(2, index_BMN, True)
        return held_BV[:, None] | on_path_BMV[..., :size]

    def _barred(self, depth_BM: Tensor) -> Tensor | None:
        if self.banned_BV is None:
            return None
        banned_BMV = self.banned_BV[:, None].expand(-1, depth_BM.shape[1], -1)
        if not self.sampling.min_new_tokens:
            return banned_BMV
        early_BM = self.counter("written")[:, None] + depth_BM < self.sampling.min_new_tokens
        return banned_BMV | (early_BM[..., None] & self.eos_V)

    def append(self, tokens_BM: Tensor, count_B: Tensor) -> None:
        """Append the first `count_B` tokens to the text."""
        at_M = torch.arange(tokens_BM.shape[1], device=tokens_BM.device)
        counts_BM = at_M < count_B[:, None]
        place_BM = self.counter("length")[:, None] + 1 + at_M
        self.text_BS.scatter_(1, torch.where(counts_BM, place_BM, self.shape.capacity), tokens_BM)
        # the last token is marked already
        index_BM = torch.where(counts_BM, tokens_BM, self.counter("last")[:, None])
        for held_BV in (self.seen_BV, self.written_BV):
            if held_BV is not None:
                held_BV.scatter_(1, index_BM, True)

    def last_tokens(self, count: int) -> Tensor:
        """The last tokens of each text, (B, count); 0 before its start."""
        first_B1 = self.counter("length")[:, None] + 1 - count
        place_BC = first_B1 + torch.arange(count, device=first_B1.device)
        return self.text_BS.gather(1, place_BC.clamp(min=0)) * (place_BC >= 0)

    def place(self, depth_BM: Tensor, end: int, tree: bool) -> tuple[Tensor, Tensor]:
        """Make the cache write a round's tokens behind each row's text; returns the new tokens'
        positions (B, M), and for each entry how far it is behind the text (B, S)."""
        length_B1 = self.counter("length")[:, None]
        at_M = torch.arange(depth_BM.shape[1], device=length_B1.device)
        behind_BS = torch.arange(end, device=length_B1.device) - length_B1
        keys_BS = None
        if tree:
            inside_BS = (behind_BS >= 0) & (behind_BS < len(at_M))
            depth_BS = depth_BM.gather(1, behind_BS.clamp(0, len(at_M) - 1))
            keys_BS = length_B1 + torch.where(inside_BS, depth_BS, behind_BS)
        self.cache.slots = Slots(self.rows_B1, length_B1 + at_M, end, keys_BS)
        # drafts that do not count may lie behind the end of the context
        return (length_B1 + depth_BM).clamp(max=self.target.context_limit - 1), behind_BS
