"""The transformer of SEDD (arXiv 2310.16834) and MDLM (2406.07524).

Parameters have the published names and order, so that checkpoints and their unnamed lists of
averaged weights fit. The vocabulary V includes the mask. Besides the published attention (every
position sees every other) a clean prefix can be causal; then its keys and values are cached, and
drafting costs the block, not the context.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.kernels.replacing import speed_up_linears
from specalign.lm.cache import KVCache
from specalign.lm.slabs import LayerShape
from specalign.models.ddit_layers import (
    DDiTBlock,
    DDiTConfig,
    DDiTHead,
    Rotary,
    SigmaMap,
    VocabEmbedding,
)
from specalign.models.diffusion_network import DiffusionNetwork


class DDiT(DiffusionNetwork):
    """The network f: logits, or SEDD's log-score, if `scale_by_sigma` without the part that σ
    gives."""

    def __init__(self, config: DDiTConfig, attention_backend: str = "sdpa") -> None:
        super().__init__()
        self.config = config
        self.vocab_embed = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.sigma_map = SigmaMap(config.cond_dim)
        self.rotary_emb = Rotary(config.head_dim)
        self.blocks = nn.ModuleList(
            DDiTBlock(config, attention_backend) for _ in range(config.n_blocks)
        )
        self.output_layer = DDiTHead(config)
        self.vocab_size, self.mask_token_id = config.vocab_size, config.vocab_size - 1
        self.attention = config.attention

    def run(
        self,
        tokens_BL: Tensor,
        see: Tensor | None,
        positions_BL: Tensor,
        cache: KVCache | None,
        sigma: Tensor | None = None,
    ) -> Tensor:
        condition = self._condition(sigma, tokens_BL.shape, tokens_BL.device)
        rotary = self.rotary_emb(positions_BL)
        x_BLD = self.vocab_embed(tokens_BL)
        for i, block in enumerate(self.blocks):
            x_BLD = block(x_BLD, condition, rotary, see, None if cache is None else cache.slabs[i])
        return x_BLD

    def head(self, hidden: Tensor, sigma: Tensor | None = None) -> Tensor:
        return self.output_layer(hidden, self._condition(sigma, hidden.shape[:-1], hidden.device))

    def prepare_for_drafting(self) -> None:
        """As `MaskedLM.prepare_for_drafting`."""
        weight = self.vocab_embed.embedding
        for part in (self.blocks, self.output_layer):
            speed_up_linears(part, weight.dtype, weight.device, torch.bfloat16)
        speed_up_linears(self, weight.dtype, weight.device)  # the rest is small

    def new_cache(self, capacity: int, rows: int = 1) -> KVCache:
        c, weight = self.config, self.vocab_embed.embedding
        shape = LayerShape(c.n_heads, c.head_dim, c.head_dim)
        return KVCache([shape] * c.n_blocks, rows, capacity, weight.dtype, weight.device)

    def _condition(
        self, sigma: Tensor | None, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """silu(sigma_map(σ)) for tokens of `shape` (…, L): (…, 1 or L, cond_dim)."""
        if self.config.time_input == "zero":
            sigma = torch.zeros(shape[:-1], dtype=torch.float32, device=device)
        assert sigma is not None, "this network is conditioned on σ"
        if sigma.shape == shape[:-1]:
            sigma = sigma[..., None]
        return F.silu(self.sigma_map(sigma))
