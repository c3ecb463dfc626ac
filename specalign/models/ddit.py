"""The transformer of SEDD (arXiv 2310.16834), MDLM (2406.07524), RADD (2406.03736) and BD3-LM
(2503.09573).

Parameters have the published names and order, so that checkpoints and their unnamed lists of
averaged weights fit. The vocabulary V includes the mask. Besides the published attention (every
position sees every other) a clean prefix can be causal, by tokens or by blocks; then its keys and
values are cached, and drafting costs the block, not the context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.kernels.replacing import speed_up_linears
from specalign.lm.attention import block_mask, clean_then_noisy
from specalign.lm.cache import KVCache, LayerShape
from specalign.models.ddit_layers import (
    DDiTBlock,
    DDiTConfig,
    DDiTHead,
    Rotary,
    SigmaMap,
    VocabEmbedding,
)


class DDiT(nn.Module):
    """The network f: logits, or SEDD's log-score, if `scale_by_sigma` without the part that σ
    gives."""

    def __init__(self, config: DDiTConfig, attention_backend: str = "sdpa") -> None:
        super().__init__()
        self.config = config
        self.vocab_embed = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.sigma_map = SigmaMap(config.cond_dim) if config.time_input != "none" else None
        self.rotary_emb = Rotary(config.head_dim)
        self.blocks = nn.ModuleList(
            DDiTBlock(config, attention_backend) for _ in range(config.n_blocks)
        )
        self.output_layer = DDiTHead(config)

        self.vocab_size, self.mask_token_id = config.vocab_size, config.vocab_size - 1
        self.attention, self.block_size = config.attention, config.block_size
        # clean tokens enter the cache in multiples of this: a block sees all of itself
        self.kept_at_once = config.block_size or 1

    def forward(self, tokens_BL: Tensor, sigma: Tensor | None = None, **options: Any) -> Tensor:
        """f, (B, L, V); arguments of `hidden`."""
        return self.head(self.hidden(tokens_BL, sigma, **options), sigma)

    def hidden(
        self,
        tokens_BL: Tensor,
        sigma: Tensor | None = None,
        *,
        positions_BL: Tensor | None = None,
        see: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What `head` reads, (B, L, D).

        Args:
            tokens_BL: ids, including the mask's.
            sigma: total noise, (B,) or (B, L); used only if `time_input` is `sigma`.
            positions_BL: rotary positions; None = counted from the cache's end.
            see: bool, broadcastable to (B, 1, L, S), True = attend; None = by the config's
                attention, and with a cache everything.
            cache: a clean prefix, with room for L more; its length stays.
        """
        length, past = tokens_BL.shape[1], 0
        if cache is not None:
            past = cache.length
            cache.check_room(length)
        elif see is None:
            see = self._default_mask(length, 0, tokens_BL.device)
        if positions_BL is None:
            positions_BL = torch.arange(past, past + length, device=tokens_BL.device)[None]
        condition = self._condition(sigma, tokens_BL.shape, tokens_BL.device)
        rotary = self.rotary_emb(positions_BL)
        x_BLD = self.vocab_embed(tokens_BL)
        for i, block in enumerate(self.blocks):
            x_BLD = block(x_BLD, condition, rotary, see, None if cache is None else cache.slabs[i])
        return x_BLD

    def block_hidden(
        self,
        tokens_BS: Tensor,
        sigma_BS: Tensor,
        positions_BS: Tensor,
        see: Tensor,
        index_BA: Tensor,
        size: int,
    ) -> Tensor:
        """`hidden` of the A blocks at the end of rows of tokens, (B, A, K, D)."""
        count = index_BA.shape[1]
        hidden_BSD = self.hidden(tokens_BS, sigma_BS, positions_BL=positions_BS, see=see)
        return hidden_BSD[:, -count * size :].unflatten(1, (count, size))

    def head(self, hidden: Tensor, sigma: Tensor | None = None) -> Tensor:
        """f of any rows, (…, D) → (…, V); `sigma` of shape (…), or without its last dimension."""
        return self.output_layer(hidden, self._condition(sigma, hidden.shape[:-1], hidden.device))

    def prepare_for_drafting(self) -> None:
        """As `MaskedLM.prepare_for_drafting`."""
        weight = self.vocab_embed.embedding
        for part in (self.blocks, self.output_layer):
            speed_up_linears(part, weight.dtype, weight.device, torch.bfloat16)
        speed_up_linears(self, weight.dtype, weight.device)  # the rest is small

    def new_cache(self, capacity: int, rows: int = 1) -> KVCache:
        """Room for `capacity` positions, including the noisy block's."""
        c, weight = self.config, self.vocab_embed.embedding
        shape = LayerShape(c.n_heads, c.head_dim, c.head_dim)
        return KVCache([shape] * c.n_blocks, rows, capacity, weight.dtype, weight.device)

    @torch.no_grad()
    def denoise(
        self, clean_BC: Tensor, noisy_BK: Tensor, sigma_B: Tensor, cache: KVCache
    ) -> Tensor:
        """f of a noisy block after the cached prefix and the clean tokens after that, (B, K, V), in
        one pass. The block sees everything, itself in both directions; under block_causal
        attention, its own and earlier blocks. The clean tokens (σ = 0) stay in the cache, under
        block_causal attention only whole blocks of them: pass the others again. Either may be
        empty."""
        clean, noisy, past = clean_BC.shape[1], noisy_BK.shape[1], cache.length
        tokens_BS, sigma = torch.cat((clean_BC, noisy_BK), 1), sigma_B
        if clean:
            zero_BC = sigma_B.new_zeros(clean_BC.shape)
            sigma = torch.cat((zero_BC, sigma_B[:, None].expand(-1, noisy)), 1)
        see = None  # everything
        if self.config.attention == "block_causal":
            see = self._default_mask(clean + noisy, past, tokens_BS.device)
        elif clean:
            see_SS = clean_then_noisy(clean, noisy, tokens_BS.device)
            see = block_mask(see_SS, clean + noisy, past, 1, torch.bool, tokens_BS.device)
        hidden_BSD = self.hidden(tokens_BS, sigma, see=see, cache=cache)
        f_BKV = self.head(hidden_BSD[:, clean:], sigma_B)
        cache.advance(clean // self.kept_at_once * self.kept_at_once)
        return f_BKV

    def _default_mask(self, length: int, past: int, device: torch.device) -> Tensor | None:
        if self.config.attention == "full":
            return None
        if self.config.attention == "prefix_causal":
            return block_mask(None, length, past, 1, torch.bool, device)
        block = torch.arange(past + length, device=device) // self.config.block_size
        return (block[past:, None] >= block)[None, None]

    def _condition(
        self, sigma: Tensor | None, shape: tuple[int, ...], device: torch.device
    ) -> Tensor | None:
        """silu(sigma_map(σ)) for tokens of `shape` (…, L): (…, 1 or L, cond_dim)."""
        if self.sigma_map is None:
            return None
        if self.config.time_input == "zero":
            sigma = torch.zeros(shape[:-1], dtype=torch.float32, device=device)
        assert sigma is not None, "this network is conditioned on σ"
        if sigma.shape == shape[:-1]:
            sigma = sigma[..., None]
        return F.silu(self.sigma_map(sigma))
