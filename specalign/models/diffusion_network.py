"""What the networks of standalone diffusion drafters have in common: rows that predict their own
position, noisy blocks after a clean prefix, and a cache of that prefix."""

from typing import Any

import torch
from torch import Tensor, nn

from specalign.lm.attention import expand_mask, visible_mask
from specalign.lm.cache import KVCache


class DiffusionNetwork(nn.Module):
    """A network f over tokens and masks. Subclasses have `run` and `head`.

    attention: `full`, or `prefix_causal`: clean tokens see their past. shift: how many places
    before a token the raw row that predicts it is. groups: query heads for each key head. opens:
    without a mask rows see all.
    """

    attention: str
    vocab_size: int
    mask_token_id: int
    shift: int = 0
    groups: int = 1
    opens: bool = True

    def run(
        self,
        tokens_BL: Tensor,
        see: Tensor | None,
        positions_BL: Tensor,
        cache: KVCache | None,
        sigma: Tensor | None = None,
    ) -> Tensor:
        """The raw hidden states, (B, L, D). see: bool, broadcastable to (B, 1, L, S), or as
        `expand_mask` makes it; None = everything. cache: a clean prefix, with room for L more; its
        length stays. sigma: total noise, (B,) or (B, L)."""
        raise NotImplementedError

    def head(self, hidden: Tensor, sigma: Tensor | None = None) -> Tensor:
        """f of any rows, (…, D) → (…, V); `sigma` of shape (…), or without its last dimension."""
        raise NotImplementedError

    def new_cache(self, capacity: int, rows: int = 1) -> KVCache:
        """Room for `capacity` positions, including the noisy block's."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Of its arithmetic."""
        return next(self.parameters()).dtype

    def hidden(
        self,
        tokens_BL: Tensor,
        sigma: Tensor | None = None,
        *,
        positions_BL: Tensor | None = None,
        see: Tensor | None = None,
    ) -> Tensor:
        """What `head` turns into the prediction of each position, (B, L, D). With a shift the row
        of position 0 is zero. Arguments as of `run`."""
        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)[None]
        return self._predicting(self.run(tokens_BL, see, positions_BL, None, sigma), None)

    def forward(self, tokens_BL: Tensor, sigma: Tensor | None = None, **options: Any) -> Tensor:
        """f, (B, L, V); arguments of `hidden`."""
        return self.head(self.hidden(tokens_BL, sigma, **options), sigma)

    def block_hidden(
        self,
        tokens_BS: Tensor,
        sigma_BS: Tensor,
        positions_BS: Tensor,
        see: Tensor,
        index_BA: Tensor,
        size: int,
    ) -> Tensor:
        """The hidden states that predict the A blocks at the end of rows of tokens, (B, A, K, D).
        With a shift a block's anchor, at `index_BA` of the row, predicts its first position."""
        raw_BSD = self.run(tokens_BS, see, positions_BS, None, sigma_BS)
        count = index_BA.shape[1]
        blocks = raw_BSD[:, -count * size :].unflatten(1, (count, size))
        if not self.shift:
            return blocks
        first = raw_BSD.gather(1, index_BA[..., None].expand(-1, -1, raw_BSD.shape[-1]))
        return torch.cat((first[:, :, None], blocks[:, :, :-1]), dim=2)

    def _predicting(self, raw_BLD: Tensor, before_BD: Tensor | None) -> Tensor:
        """Rows moved to the positions that they predict."""
        if not self.shift:
            return raw_BLD
        first = torch.zeros_like(raw_BLD[:, 0]) if before_BD is None else before_BD
        return torch.cat((first[:, None], raw_BLD[:, :-1]), dim=1)

    @torch.no_grad()
    def denoise(
        self,
        clean_BC: Tensor,
        noisy_BK: Tensor,
        cache: KVCache,
        before_BD: Tensor | None = None,
        sigma_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """f of a noisy block after the cached prefix and the clean tokens after that, (B, K, V), in
        one pass; and, with a shift, the raw hidden state of the last cached token: the next call's
        `before_BD`. The block sees everything, itself in both directions. The clean tokens (σ = 0)
        stay in the cache. Either may be empty."""
        clean, noisy, past = clean_BC.shape[1], noisy_BK.shape[1], cache.length
        length, device = clean + noisy, clean_BC.device
        cache.check_room(length)
        sigma, see = sigma_B, None
        if sigma_B is not None and clean:
            zero_BC = sigma_B.new_zeros(clean_BC.shape)
            sigma = torch.cat((zero_BC, sigma_B[:, None].expand(-1, noisy)), 1)
        if length > 1 and (clean or not self.opens):
            see_LS = visible_mask(None, length, past, device)
            see_LS[clean:] = True  # the noisy block
            see = expand_mask(see_LS, self.groups, self.dtype)
        positions = torch.arange(past, past + length, device=device)[None]
        raw_BSD = self.run(torch.cat((clean_BC, noisy_BK), 1), see, positions, cache, sigma)
        f_BKV = self.head(self._predicting(raw_BSD, before_BD)[:, clean:], sigma_B)
        cache.advance(clean)
        if self.shift and clean:
            before_BD = raw_BSD[:, clean - 1]
        return f_BKV, before_BD
