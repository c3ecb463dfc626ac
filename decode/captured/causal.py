"""A smaller causal language model in a captured round."""

import torch
from torch import Tensor

from decode.captured.drafting import Draft, Drafting, Unsupported, fixed_shape, room_of
from decode.captured.state import RowState
from decode.proposers.autoregressive import (
    READ_AT_ONCE,
    AutoregressiveProposer,
    count_missing,
    fit_vocabulary,
)
from decode.speculation.sampling import best, draw_at, probs
from decode.speculation.tree import chain
from specalign.lm.cache import KVCache, Slots


class CausalChain(Drafting):
    """K tokens in a row, each after those before it.

    unread: how many of the text's last tokens a round reads first. The model has not read the last
    of its accepted drafts, and none of those that something else proposed.
    """

    cache: KVCache
    unread: int

    catches_up = True

    def __init__(self, proposer: AutoregressiveProposer) -> None:
        self.model, self.nodes = proposer.model, proposer.draft_tokens

    def check(self, longest: int) -> None:
        if longest + self.nodes > self.model.context_limit:
            raise Unsupported(
                f"the drafter's context of {self.model.context_limit} tokens is short"
            )

    def allocate(self, state: RowState) -> None:
        if self.model.device != state.target.device:
            raise Unsupported("the drafter is on another device")
        self.missing = count_missing(self.model, state.target)
        self.unread = 2 if state.shape.nodes == self.nodes else state.shape.nodes + 1
        # one more, for places before the start of a text
        self.cache = self.model.new_cache(state.shape.rows, state.shape.capacity + 1)

    def start(self, row: int, tokens: list[int]) -> None:
        view = self.cache.row(row)
        known = torch.tensor([tokens[:-1]], device=self.model.device)
        for part in known.clamp(max=self.model.vocab_size - 1).split(READ_AT_ONCE, dim=1):
            self.model.forward(part, cache=view, logits=False)

    def catch_up(self, state: RowState, end: int, count: int) -> None:
        tokens_BC = state.last_tokens(self.unread + count)[:, :count]
        at_B1 = state.counter("length")[:, None] + 1 - self.unread - count
        self._read(state, tokens_BC, at_B1, end)

    def draft(self, state: RowState, end: int) -> Draft:
        nodes, room_B = self.nodes, room_of(state, self.nodes)
        above_BN, depth_BN = fixed_shape(chain(nodes), room_B)
        unread = state.last_tokens(self.unread)
        at_B1 = state.counter("length")[:, None] + 1 - self.unread
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        for i in range(nodes):
            hidden_BLD = self._read(state, unread, at_B1, end)
            logits_B1V = fit_vocabulary(self.model.head(hidden_BLD[:, -1:]), self.missing)
            ahead = torch.full_like(at_B1, i)
            drafts_BN = torch.cat(tokens, 1) if tokens else at_B1[:, :0]
            on_path = torch.ones_like(drafts_BN, dtype=torch.bool)[:, None]
            before = state.before(on_path, drafts_BN, ahead)
            if state.sampling.greedy:
                token_B1 = best(logits_B1V, state.sampling, before, fixed=True)
            else:
                q_B1V = probs(logits_B1V, state.sampling, before, fixed=True)
                token_B1 = draw_at(q_B1V, state.uniform(ahead, depth_BN[:, i : i + 1] > 0))
                q.append(q_B1V)
            tokens.append(token_B1)
            at_B1 = at_B1 + unread.shape[1]
            unread = token_B1
        q_BNV = torch.cat(q, 1) if q else None
        return Draft(torch.cat(tokens, 1), above_BN, depth_BN, q_BNV, room_B, chain(nodes))

    def _read(self, state: RowState, tokens_BL: Tensor, at_B1: Tensor, end: int) -> Tensor:
        """Hidden states of tokens at places from `at_B1` on."""
        model = self.model
        places_BL = at_B1 + torch.arange(tokens_BL.shape[1], device=at_B1.device)
        slots_BL = torch.where(places_BL < 0, state.shape.capacity, places_BL)
        places_BL = places_BL.clamp(min=0)
        self.cache.slots = Slots(state.rows_B1, slots_BL, end)
        see = torch.arange(end, device=at_B1.device) <= places_BL[..., None]
        output = model.forward(
            tokens_BL.clamp(max=model.vocab_size - 1), cache=self.cache, positions_BL=places_BL,
            mask=see[:, None], logits=False,
        )  # fmt: skip
        return output.hidden_BLD
