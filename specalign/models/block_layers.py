"""Layers of a block drafter, which attend to the context and to their own block."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers.activations import ACT2FN

from specalign.kernels.fusing import fused_on_gpu
from specalign.lm.attention import rotate
from specalign.models.block_config import BlockConfig
from specalign.models.block_mask import KeysValues, Sight, attend_sparsely


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, the mean square in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class BlockAttention(nn.Module):
    """Attention of A blocks over a shared context and each over itself. Rotary tables are (…, L,
    w): one of head_dim, or one for each layer side by side."""

    partner: Tensor | None

    def __init__(self, config: BlockConfig, layer: int = 0) -> None:
        super().__init__()
        c, bias = config, config.attention_bias
        rotary = c.rotary_of(layer)
        partner = None if rotary is None or rotary.full(c.head_dim) else rotary.partner(c.head_dim)
        self.register_buffer("partner", partner, persistent=False)
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.head_dim, self.value_dim = c.head_dim, c.value_dim or c.head_dim
        first = layer * c.head_dim if len(c.rotary) > 1 else 0
        self.table = slice(first, first + c.head_dim)
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
        """(…, L, D) → (…, H, L, d), rotated."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)).transpose(-3, -2)
        return self._rotate(self.q_norm(q) if self.qk_norm else q, cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
        """(…, L, D) → keys, rotated, and values, (…, Hkv, L, d) each."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(-3, -2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.value_dim)).transpose(-3, -2)
        return self._rotate(self.k_norm(k) if self.qk_norm else k, cos, sin), v

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[..., None, :, self.table], sin[..., None, :, self.table]
        return rotate(x, cos, sin) if self.partner is None else x * cos + x[..., self.partner] * sin

    def forward(
        self, x_BAKD: Tensor, cos: Tensor, sin: Tensor, context: KeysValues, see: Sight
    ) -> Tensor:
        """`context`: keys and values (B, Hkv, L, d); `see`: what each block sees of it."""
        q = self.queries(x_BAKD, cos, sin)  # (B, A, H, K, d)
        k, v = self.keys_values(x_BAKD, cos, sin)  # (B, A, Hkv, K, d)
        if isinstance(see, BlockMask):
            return self.o_proj(attend_sparsely(q, (k, v), context, see, self.scale))
        batch, anchors, _, size, width = q.shape
        groups = self.heads // self.kv_heads
        q = q.reshape(batch, anchors, self.kv_heads, groups * size, width) * self.scale
        context_k, context_v = context
        wide = q.transpose(1, 2).reshape(batch, self.kv_heads, -1, width)  # (B, Hkv, A·G·K, d)
        scores = wide @ context_k.transpose(-1, -2)
        scores = scores.view(batch, self.kv_heads, anchors, groups * size, -1)
        own = (q @ k.transpose(-1, -2)).transpose(1, 2)  # (B, Hkv, A, G·K, K)
        weights = _softmax(scores, own) if see is None else _masked_softmax(scores, own, see)
        of_context, of_own = weights.split((scores.shape[-1], size), dim=-1)
        out = (of_context.flatten(2, 3) @ context_v).view(*scores.shape[:-1], self.value_dim)
        out = (out + of_own @ v.transpose(1, 2)).unflatten(3, (groups, size))
        return self.o_proj(out.permute(0, 2, 4, 1, 3, 5).reshape(batch, anchors, size, -1))


def _softmax(scores: Tensor, own: Tensor) -> Tensor:
    """Over a context's scores (B, Hkv, A, Q, L) and those of the own block (B, Hkv, A, Q, K)."""
    return torch.cat((scores, own), dim=-1).float().softmax(-1).to(own.dtype)


@fused_on_gpu
def _masked_softmax(scores: Tensor, own: Tensor, see_BAL: Tensor) -> Tensor:
    return _softmax(scores.masked_fill(~see_BAL[:, None, :, None, :], -torch.inf), own)


class BlockMLP(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class TwoTapConvolution(nn.Module):
    """Two convolutions over each row of a block and the row before it, on a sublayer's input x and
    output (DFlash 2):

        out[i, c] = (1 + o[0, c] + δ[i, 0, g(c)])·in[i, c] + (o[1, c] + δ[i, 1, g(c)])·in[i−1, c],

    in[−1] = 0, δ = W·x for groups g of `GROUP` channels. o and W start at zero: the identity.
    """

    GROUP = 16

    def __init__(self, width: int) -> None:
        super().__init__()
        self.group = math.gcd(width, self.GROUP)
        self.offset = nn.Parameter(torch.zeros(2, 2, width))
        # no random draw: the other weights start the same with and without it
        self.delta = nn.utils.skip_init(nn.Linear, width, 4 * width // self.group, bias=False)
        nn.init.zeros_(self.delta.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """`sublayer` between both convolutions, (…, rows of a block, D) → the same shape."""
        delta = self.delta(x).unflatten(-1, (2, 2, -1))
        return self._mix(sublayer(self._mix(x, delta, 0)), delta, 1)

    def _mix(self, x: Tensor, delta: Tensor, which: int) -> Tensor:
        before = F.pad(x[..., :-1, :], (0, 0, 1, 0))
        for tap, row in ((0, x), (1, before)):
            offset = self.offset[which, tap].unflatten(-1, (-1, self.group))
            weight = offset + delta[..., which, tap, :, None]
            x = x + weight.flatten(-2) * row
        return x


class BlockLayer(nn.Module):
    """Pre-norm attention and feed-forward, with two-tap convolutions around them if asked for."""

    FORWARDS = ("keys_values",)
    """Its methods that use weights, besides `forward`."""

    def __init__(self, config: BlockConfig, layer: int = 0) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, layer)
        self.mlp = BlockMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_conv: TwoTapConvolution | None = None
        self.mlp_conv: TwoTapConvolution | None = None
        if config.convolution:
            self.attn_conv = TwoTapConvolution(config.hidden_size)
            self.mlp_conv = TwoTapConvolution(config.hidden_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: KeysValues, see: Sight
    ) -> Tensor:
        def attend(rows: Tensor) -> Tensor:
            return self.self_attn(rows, cos, sin, context, see)

        normed = self.input_layernorm(x)
        x = x + (attend(normed) if self.attn_conv is None else self.attn_conv(normed, attend))
        normed = self.post_attention_layernorm(x)
        return x + (self.mlp(normed) if self.mlp_conv is None else self.mlp_conv(normed, self.mlp))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
        """Keys and values of a context, (…, L, D) → (…, Hkv, L, d) each."""
        return self.self_attn.keys_values(x, cos, sin)


class ConfidenceHead(nn.Module):
    """DSpark's confidence head: σ(w·[h_k; e(x_{k−1})] + b) predicts the acceptance β_k = Σ min(p_k,
    q_k). It starts at 1/2."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        widths = {"": config.hidden_size, "markov": config.markov_rank, "hidden": 0}
        self.out = nn.Linear(config.hidden_size + widths[config.confidence_input], 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Hidden states (…, D) and what is read of the previous tokens (…, w) → logits (…)."""
        return self.out(torch.cat((hidden, previous), dim=-1))[..., 0]
