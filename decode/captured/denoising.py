"""Standalone diffusion drafters in a captured round: K masks after the text, unmasked in T steps."""

from math import ceil

import torch
from torch import Tensor

from decode.captured.drafting import Draft, Drafting, fixed_shape, room_of
from decode.captured.state import RowState
from decode.proposers.diffusion import DiffusionProposer
from decode.speculation.sampling import best, draw_at, probs
from decode.speculation.settings import Sampling
from decode.speculation.tree import chain
from specalign.lm.cache import KVCache, Slots
from specalign.models.standalone import DiffusionDrafter


class WindowContext:
    """For a network of full attention: every pass reads the last tokens again."""

    def __init__(self, drafter: DiffusionDrafter, state: RowState) -> None:
        self.drafter = drafter

    def start(self, row: int, tokens: list[int]) -> None:
        pass

    def catch_up(self, state: RowState, end: int, count: int) -> None:
        pass

    def begin(self, state: RowState, end: int) -> None:
        """A round begins."""
        window = min(self.drafter.config.window, end)
        self._clean_BW = state.last_tokens(window)
        back_W = torch.arange(window - 1, -1, -1, device=self._clean_BW.device)
        self._inside_BW = back_W <= state.counter("length")[:, None]

    def denoise(self, block_BK: Tensor) -> Tensor:
        """The network's output of a block, (B, K, V)."""
        tokens_BS = torch.cat((self._clean_BW, block_BK), 1)
        ones_BK = torch.ones_like(block_BK, dtype=torch.bool)
        inside_BS = torch.cat((self._inside_BW, ones_BK), 1)
        hidden_BSD, sigma_B = self.drafter.window_hidden(tokens_BS, inside_BS)
        hidden_BKD = hidden_BSD[:, -block_BK.shape[1] :]
        return self.drafter.logits(hidden_BKD, sigma_B[:, None].expand(block_BK.shape))


class PrefixContext:
    """For a network that caches a clean prefix: the first pass of a round also reads the tokens
    that are new, at most N + 1 (rows behind them are written again later)."""

    cache: KVCache

    def __init__(self, drafter: DiffusionDrafter, state: RowState) -> None:
        self.drafter, self.new = drafter, state.shape.nodes + 1
        rows, capacity = state.shape.rows, state.shape.capacity
        self.cache = drafter.network.new_cache(capacity + 2 * self.new, rows)
        # how many tokens are cached, and with a shift the last one's hidden state
        self.cached_B = torch.zeros(rows, dtype=torch.int64, device=state.target.device)

    def start(self, row: int, tokens: list[int]) -> None:
        """Read all tokens but the last, which the first round reads."""
        drafter = self.drafter
        known = torch.tensor([tokens[:-1]], device=self.cached_B.device)
        view = self.cache.row(row)
        nothing = known[:, :0]
        sigma_1 = drafter.sigma_for_mask_fraction(known.new_zeros(1, dtype=torch.float32))
        if known.shape[1]:
            drafter.network.denoise(known, nothing, view, None, sigma_1)
        self.cached_B[row] = known.shape[1]

    def catch_up(self, state: RowState, end: int, count: int) -> None:
        length_B = state.counter("length")  # the last token is left to the next round
        steps_C = torch.arange(count, device=length_B.device)
        at_BC = torch.minimum(self.cached_B[:, None] + steps_C, length_B[:, None])
        self.cache.slots = Slots(state.rows_B1, at_BC, end)
        see_BCS = torch.arange(end, device=length_B.device) <= at_BC[..., None]
        tokens_BC, sigma_BC = state.text_BS.gather(1, at_BC), at_BC.new_zeros(at_BC.shape).float()
        network = self.drafter.network
        network.run(tokens_BC, see_BCS[:, None], at_BC, self.cache, sigma_BC)
        self.cached_B.copy_(torch.minimum(self.cached_B + count, length_B))

    def begin(self, state: RowState, end: int) -> None:
        self._state, self._end, self._first = state, end + 2 * self.new, True
        self._length_B1 = state.counter("length")[:, None] + 1
        self._from_B1 = self.cached_B[:, None].clone()
        now_B = torch.where(state.active_B1[:, 0], state.counter("length") + 1, self.cached_B)
        self.cached_B.copy_(now_B)

    def denoise(self, block_BK: Tensor) -> Tensor:
        drafter, network, state = self.drafter, self.drafter.network, self._state
        count = self.new if self._first else 0
        steps_C = torch.arange(count, device=block_BK.device)
        steps_K = torch.arange(block_BK.shape[1], device=block_BK.device)
        clean_at_BC = self._from_B1 + steps_C
        clean_BC = state.text_BS.gather(1, clean_at_BC.clamp(max=state.shape.capacity))
        block_at_BK = self._from_B1 + self.new + steps_K
        at_BL = torch.cat((clean_at_BC, block_at_BK), 1)
        positions_BL = torch.cat((clean_at_BC, self._length_B1 + steps_K), 1)
        self.cache.slots = Slots(state.rows_B1, at_BL, self._end)
        see = self._see(clean_at_BC, block_at_BK)
        share_B = (block_BK == drafter.mask_id).float().mean(1)
        sigma_B = drafter.sigma_for_mask_fraction(share_B)
        zero_BC = sigma_B.new_zeros(clean_BC.shape)
        sigma_BL = torch.cat((zero_BC, sigma_B[:, None].expand(block_BK.shape)), 1)
        tokens_BL = torch.cat((clean_BC, block_BK), 1)
        raw_BLD = network.run(tokens_BL, see, positions_BL, self.cache, sigma_BL)
        if network.shift and self._first:
            # rows that do not run have any numbers
            last_B = (self._length_B1 - 1 - self._from_B1)[:, 0].clamp(0, count - 1)
            self._before_BD = raw_BLD[state.rows_B1[:, 0], last_B]
        self._first = False
        block_BKD = raw_BLD[:, count:]
        if network.shift:
            block_BKD = torch.cat((self._before_BD[:, None], block_BKD[:, :-1]), 1)
        return network.head(block_BKD, sigma_B)

    def _see(self, clean_at_BC: Tensor, block_at_BK: Tensor) -> Tensor:
        """Clean tokens see their past, the block the whole text and itself."""
        place_S = torch.arange(self._end, device=block_at_BK.device)
        clean_BCS = place_S <= clean_at_BC[..., None]
        own_BS = (place_S >= block_at_BK[:, :1]) & (place_S <= block_at_BK[:, -1:])
        block_B1S = ((place_S < self._length_B1) | own_BS)[:, None]
        return torch.cat((clean_BCS, block_B1S.expand(-1, block_at_BK.shape[1], -1)), 1)[:, None]


class Denoised(Drafting):
    """K tokens of a standalone drafter, from left to right or where it is most confident."""

    context: WindowContext | PrefixContext

    def __init__(self, proposer: DiffusionProposer, sampling: Sampling) -> None:
        self.drafter, self.nodes = proposer.drafter, proposer.draft_tokens
        self.steps, self.by_q = min(proposer.steps, self.nodes), proposer.order == "confidence"
        self.law = proposer.law(sampling)

    @property
    def catches_up(self) -> bool:
        return self.drafter.cached

    def allocate(self, state: RowState) -> None:
        kind = PrefixContext if self.drafter.cached else WindowContext
        self.context = kind(self.drafter, state)

    def start(self, row: int, tokens: list[int]) -> None:
        self.context.start(row, tokens)

    def catch_up(self, state: RowState, end: int, count: int) -> None:
        self.context.catch_up(state, end, count)

    def draft(self, state: RowState, end: int) -> Draft:
        nodes, room_B = self.nodes, room_of(state, self.nodes)
        above_BN, depth_BN = fixed_shape(chain(nodes), room_B)
        last_B1 = state.counter("last")[:, None]
        block_BK = torch.full_like(last_B1, self.drafter.mask_id).repeat(1, nodes)
        steps_BK, q_BKV, left = torch.zeros_like(block_BK), None, nodes
        self.context.begin(state, end)
        for step in range(self.steps):
            f_BKV = self.context.denoise(block_BK)
            logits_BKV = self.drafter.target_logits(f_BKV.float())
            count = ceil(left / (self.steps - step))
            at_BR = self._choose_places(logits_BKV, block_BK, depth_BN > 0, nodes - left, count)
            live_BR = at_BR < room_B[:, None]
            rows_BRV = at_BR[..., None].expand(-1, -1, logits_BKV.shape[2])
            chosen_BRV = logits_BKV.gather(1, rows_BRV)
            before = state.before(None, last_B1, at_BR)
            if self.law == "point":
                tokens_BR = best(chosen_BRV, state.sampling, before, fixed=True)
            else:
                q_BRV = probs(chosen_BRV, state.sampling, before, fixed=True)
                used = torch.arange(nodes - left, nodes - left + count, device=at_BR.device)
                tokens_BR = draw_at(q_BRV, state.uniform(used.expand_as(at_BR), live_BR))
                q_BKV = q_BRV.new_zeros(logits_BKV.shape) if q_BKV is None else q_BKV
                q_BKV = q_BKV.scatter(1, rows_BRV, q_BRV)
            tokens_BR = torch.where(live_BR, tokens_BR, self.drafter.mask_id)
            block_BK = block_BK.scatter(1, at_BR, tokens_BR)
            steps_BK = steps_BK.scatter(1, at_BR, step)
            left -= count
        tokens_BK = torch.where(depth_BN > 0, block_BK, 0)  # no masks
        steps = steps_BK if self.law == "unmasked" else None
        return Draft(tokens_BK, above_BN, depth_BN, q_BKV, room_B, chain(nodes), steps_BN=steps)

    def _choose_places(
        self, logits_BKV: Tensor, block_BK: Tensor, live_BK: Tensor, done: int, count: int
    ) -> Tensor:
        """The places that a step unmasks, ascending, (B, count). Those behind the end of an output
        come last, and stay masked."""
        place_K = torch.arange(block_BK.shape[1], device=block_BK.device)
        if not self.by_q:
            return place_K[done : done + count].expand(len(block_BK), -1)
        rank_BK = -logits_BKV.log_softmax(-1).amax(-1)
        rank_BK = torch.where(live_BK, rank_BK, torch.finfo(rank_BK.dtype).max)
        open_BK = rank_BK.masked_fill(block_BK != self.drafter.mask_id, torch.inf)
        return open_BK.argsort(1)[:, :count].sort(1).values
