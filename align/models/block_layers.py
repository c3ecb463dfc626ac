"""The parts of a block drafter: layers that attend to the context and to their own block, and the small heads on top."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from align.kernels.fusing import fused_on_gpu
from align.models.block_config import BlockConfig
from align.target.attention import grouped_attention, rotate


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, the mean square taken in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class BlockAttention(nn.Module):
    """Attention of block rows over a context and their own block.

    Rotary tables hold one after the other what the layers need, width head_dim each, or once what all need.
    """

    partner: Tensor | None

    def __init__(self, config: BlockConfig, layer: int = 0) -> None:
        super().__init__()
        c, bias = config, config.attention_bias
        self.value_dim = c.value_dim or c.head_dim
        rotary = c.rotary_of(layer)
        own = rotary is not None and not rotary.full(c.head_dim)
        self.register_buffer(
            "partner", rotary.partner(c.head_dim) if rotary and own else None, persistent=False
        )
        self.table = layer if len(c.rotary) > 1 else 0
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.scale = c.head_dim**-0.5
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.value_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.value_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.qk_norm = c.qk_norm

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(…, L, D) → (…, H, L, d), rotated; the tables are (…, L, d)."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)).transpose(-3, -2)
        return self._rotated(self.q_norm(q) if self.qk_norm else q, cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(…, L, D) → keys, rotated, and values, (…, Hkv, L, d) each."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(-3, -2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.value_dim)).transpose(-3, -2)
        return self._rotated(self.k_norm(k) if self.qk_norm else k, cos, sin), v

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(…, heads, L, d) with its positions; the tables are (…, L, w)."""
        mine = slice(self.table * self.head_dim, (self.table + 1) * self.head_dim)
        cos, sin = cos[..., None, :, mine], sin[..., None, :, mine]
        return rotate(x, cos, sin) if self.partner is None else x * cos + x[..., self.partner] * sin

    def forward(
        self, x_BAKD: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], see_BAL: Tensor
    ) -> Tensor:
        """Training: A blocks a row, each over the context places it may see (B, A, L) and over itself."""
        q = self.queries(x_BAKD, cos, sin)  # (B, A, H, K, d)
        k, v = self.keys_values(x_BAKD, cos, sin)  # (B, A, Hkv, K, d)
        batch, anchors, _, size, width = q.shape
        groups = self.heads // self.kv_heads
        q = q.reshape(batch, anchors, self.kv_heads, groups * size, width) * self.scale
        ctx_k, ctx_v = context  # (B, Hkv, L, d)
        wide = q.transpose(1, 2).reshape(batch, self.kv_heads, -1, width)  # (B, Hkv, A·G·K, d)
        scores = (wide @ ctx_k.transpose(-1, -2)).view(batch, self.kv_heads, anchors, groups * size, -1)
        own = (q @ k.transpose(-1, -2)).transpose(1, 2)  # (B, Hkv, A, G·K, K)
        of_context, of_own = _weights(scores, own, see_BAL)
        out = (of_context.flatten(2, 3) @ ctx_v).view(
            batch, self.kv_heads, anchors, groups * size, self.value_dim
        )
        out = out + of_own @ v.transpose(1, 2)
        out = out.view(batch, self.kv_heads, anchors, groups, size, self.value_dim).permute(0, 2, 4, 1, 3, 5)
        return self.o_proj(out.reshape(batch, anchors, size, -1))

    def draft(
        self, x_BKD: Tensor, cos: Tensor, sin: Tensor, ctx_k: Tensor, ctx_v: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Decoding: one block a row over the whole context given, (B, Hkv, n, d), and over itself; several blocks in a
        row, one after the other, with a `mask` that keeps them apart."""
        q = self.queries(x_BKD, cos, sin)
        k, v = self.keys_values(x_BKD, cos, sin)
        out = grouped_attention(
            q, torch.cat((ctx_k, k), dim=2), torch.cat((ctx_v, v), dim=2), mask, self.scale
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


@fused_on_gpu
def _weights(scores: Tensor, own: Tensor, see_BAL: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over a context's scores (B, Hkv, A, Q, L), those that a block may see (B, A, L), and its own (B, Hkv, A, Q, K)."""
    length = scores.shape[-1]
    scores = scores.masked_fill(~see_BAL[:, None, :, None, :], -torch.inf)
    weights = torch.cat((scores, own), dim=-1).float().softmax(-1).to(own.dtype)
    return weights[..., :length], weights[..., length:]


class BlockMLP(nn.Module):
    """Gated feed-forward, the target's own shape."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class TwoTapConvolution(nn.Module):
    """Two convolutions over each row of a block and the row before it, one on a sublayer's input x, one on its output (DFlash 2):

        out[i, c] = (1 + o[0, c] + δ[i, 0, g(c)])·in[i, c] + (o[1, c] + δ[i, 1, g(c)])·in[i−1, c],

    in[−1] = 0 at the edge of the block, δ = W·x for groups g of `GROUP` channels. o and W start at zero, so that both are the
    identity, to the bit.
    """

    GROUP = 16

    def __init__(self, width: int, block_size: int) -> None:
        super().__init__()
        self.block_size, self.group = block_size, math.gcd(width, self.GROUP)
        self.offset = nn.Parameter(torch.zeros(2, 2, width))
        # a Linear that draws nothing: a drafter's other weights start the same with it and without it
        self.delta = nn.utils.skip_init(nn.Linear, width, 4 * width // self.group, bias=False)
        nn.init.zeros_(self.delta.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """`sublayer` between both convolutions, (…, rows, D) → (…, rows, D); the rows are those of whole blocks, one after the other."""
        delta = self.delta(x).unflatten(-1, (2, 2, -1))
        return self._mix(sublayer(self._mix(x, delta, 0)), delta, 1)

    def _mix(self, x: Tensor, delta: Tensor, which: int) -> Tensor:
        blocks = x.unflatten(-2, (-1, self.block_size))
        before = F.pad(blocks[..., :-1, :], (0, 0, 1, 0)).view_as(x)
        for tap, row in ((0, x), (1, before)):
            weight = self.offset[which, tap].unflatten(-1, (-1, self.group)) + delta[..., which, tap, :, None]
            x = x + weight.flatten(-2) * row
        return x


class BlockLayer(nn.Module):
    """Pre-norm attention and feed-forward, between convolutions where the config asks for them."""

    FORWARDS = ("keys_values",)
    """Its methods that use weights, beside `forward`."""

    def __init__(self, config: BlockConfig, layer: int = 0) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, layer)
        self.mlp = BlockMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_conv: TwoTapConvolution | None = None
        self.mlp_conv: TwoTapConvolution | None = None
        if config.convolution:
            self.add_convolution(config)

    def add_convolution(self, config: BlockConfig) -> None:
        """Convolutions that are the identity still."""
        device = self.input_layernorm.weight.device
        self.attn_conv = TwoTapConvolution(config.hidden_size, config.rows).to(device)
        self.mlp_conv = TwoTapConvolution(config.hidden_size, config.rows).to(device)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], see: Tensor
    ) -> Tensor:
        return self._residual(x, lambda rows: self.self_attn(rows, cos, sin, context, see))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Of a context, (…, L, D) → (…, Hkv, L, d) each."""
        return self.self_attn.keys_values(x, cos, sin)

    def draft(
        self, x: Tensor, cos: Tensor, sin: Tensor, ctx_k: Tensor, ctx_v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return self._residual(x, lambda rows: self.self_attn.draft(rows, cos, sin, ctx_k, ctx_v, mask))

    def _residual(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + _between(self.attn_conv, self.input_layernorm(x), attend)
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _between(
    convolution: TwoTapConvolution | None, x: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    return sublayer(x) if convolution is None else convolution(x, sublayer)


class ConfidenceHead(nn.Module):
    """σ(w·[h_k; e(x_{k−1})] + b), trained to the acceptance β_k = Σ min(p_k, q_k) = 1 − TV (DSpark's confidence head).

    It reads q's hidden states and changes nothing about q. Starts at 1/2. `before`: width of what it reads of the token before,
    D for its embedding (`BlockDrafter.before_confidence`).
    """

    def __init__(self, width: int, before: int | None = None) -> None:
        super().__init__()
        self.out = nn.Linear(width + (width if before is None else before), 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Hidden state (…, D) and what is read of the token before (…, w) → the logit (…)."""
        return self.out(torch.cat((hidden, previous), dim=-1))[..., 0]
