"""The block drafter: one network that drafts K tokens in one pass over [last token, MASK × (K−1)].

It is conditioned on the target, in one of two ways:

- `shared_kv`: layer i is initialised from a target layer and attends to that layer's own keys and values for the
  context; the target's last hidden state before the block is added, projected, to every position's input.
- `taps` (DFlash, arXiv 2602.06036): hidden states after chosen target layers are fused, `H_ctx = RMSNorm(fc[h_1; …;
  h_F])`, and every layer makes context keys and values from them. Parameter names are the published ones.

The block attends to itself both ways. Embedding and head are the target's, frozen and not stored. Row k predicts the
token k+1 places after the last token (`sample_from_anchor`).

A variable-prefix drafter (D²SD, arXiv 2606.04446) is the same network trained over [last token, x_1..x_j, MASK …] as
well: given the first j drafts it predicts those after them, from row j on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from align.attention import block_mask, grouped_attention, rotate
from align.cache import KVCache
from align.corruption import Anchors
from align.data import Batch
from align.errors import UserError, nearest
from align.linear import RowsLinear, fast_linear, few_rows, speed_up_linears
from align.target import Target

CONTEXTS = ("shared_kv", "taps")


@dataclass
class BlockConfig:
    """The architecture, as stored in config.json. Sizes are the target's unless said otherwise."""

    context: str
    block_size: int  # K, drafted tokens
    target_layer_ids: list[
        int
    ]  # shared_kv: whose keys and values; taps: whose outputs (id i = hidden_states[i + 1])
    init_layer_ids: list[int]  # the target layers that this drafter's layers started from
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    vocab_size: int
    mask_token_id: int
    num_target_layers: int
    rope_theta: float
    target: str
    target_sha256: str
    qk_norm: bool = False
    attention_bias: bool = False
    draft_vocab_size: int = 0  # 0 = the target's whole vocabulary
    markov_rank: int = 0  # 0 = positions are independent given the context
    confidence_head: bool = False  # foretells each position's acceptance
    sample_from_anchor: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.context not in CONTEXTS:
            raise UserError(
                f"drafter config: context={self.context!r} is unknown{nearest(self.context, CONTEXTS)}"
            )
        if not 1 <= self.block_size <= _MOST_BLOCK:
            raise UserError(f"drafter config: block_size={self.block_size} must be 1 to {_MOST_BLOCK}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"drafter config: mask_token_id={self.mask_token_id} is not within 0..{self.vocab_size - 1}"
            )
        if self.hidden_act not in ACT2FN:
            raise UserError(
                f"drafter config: hidden_act={self.hidden_act!r} is unknown{nearest(self.hidden_act, ACT2FN)}"
            )
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if bad:
            raise UserError(
                f"drafter config: target layer {bad[0]} is not within 0..{self.num_target_layers - 1}"
            )
        if self.context == "shared_kv" and len(self.target_layer_ids) != len(self.init_layer_ids):
            raise UserError("drafter config: shared_kv needs one target layer for each drafter layer")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config.json") -> BlockConfig:
        """Raises UserError for a missing key; keys that belong to other readers of the file are left alone."""
        names = {f.name for f in fields(cls)}
        for f in fields(cls):
            if f.name in values:
                _check_type(f.name, str(f.type), values[f.name], where)
        required = [f.name for f in fields(cls) if f.name not in values and f.name not in _DEFAULTED]
        if required:
            raise UserError(f"{where}: missing key {required[0]!r}, so this is not a block drafter")
        try:
            return cls(**{k: v for k, v in values.items() if k in names})
        except TypeError as error:
            raise UserError(f"{where}: {error}") from None


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda v: isinstance(v, str)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "int": ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "float": ("a finite number", lambda v: isinstance(v, int | float) and math.isfinite(v)),
    "list[int]": (
        "a list of whole numbers",
        lambda v: isinstance(v, list) and all(type(i) is int for i in v),
    ),
    "dict[str, Any]": ("an object", lambda v: isinstance(v, dict)),
}
_LEAST = {"mask_token_id": 0, "draft_vocab_size": 0, "markov_rank": 0, "rope_theta": 1e-6, "rms_norm_eps": 0}
"""The smallest value that makes sense; 1 for every other number."""
_MOST_BLOCK = 512


def _check_type(name: str, kind: str, value: Any, where: str) -> None:
    what, fits = _TYPES[kind]
    if not fits(value):
        raise UserError(f"{where}: {name} must be {what}, not {value!r:.60}")
    if kind in ("int", "float") and value < _LEAST.get(name, 1):
        raise UserError(f"{where}: {name}={value} must be at least {_LEAST.get(name, 1):g}")


_DEFAULTED = {f.name for f in fields(BlockConfig) if f.default is not MISSING or f.name == "extra"}


@dataclass
class TargetFeatures:
    """What the drafter sees of the target over packed rows, all without gradient.

    hidden_BLD: last hidden state; keys, values: per shared layer (B, Hkv, L, d), rotary positions applied; taps_BLFD.
    """

    hidden_BLD: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    taps_BLFD: Tensor | None


@torch.no_grad()
def target_features(target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
    """One frozen forward of the target over packed rows; without a config the last hidden state alone."""
    shared = config is not None and config.context == "shared_kv"
    rows, length = batch.tokens_BL.shape
    cache = target.new_cache(rows, length) if shared else None
    output = target.forward(
        batch.tokens_BL,
        cache=cache,
        positions_BL=batch.positions_BL,
        mask=batch.attention_mask(),
        taps=() if shared or config is None else config.target_layer_ids,
        logits=False,
    )
    shared_ids = config.target_layer_ids if config is not None and shared else []
    keys = [cache.k(i) for i in shared_ids] if cache is not None else []
    values = [cache.v(i) for i in shared_ids] if cache is not None else []
    return TargetFeatures(output.hidden_BLD, keys, values, output.taps_BLFD)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, the mean square taken in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class BlockAttention(nn.Module):
    """Attention of block rows over a context and their own block."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c, bias = config, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.scale = c.head_dim**-0.5
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.qk_norm = c.qk_norm

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(…, L, D) → (…, H, L, d), rotated; the tables are (…, L, d)."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)).transpose(-3, -2)
        return rotate(self.q_norm(q) if self.qk_norm else q, cos[..., None, :, :], sin[..., None, :, :])

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(…, L, D) → keys, rotated, and values, both (…, Hkv, L, d)."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(-3, -2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(-3, -2)
        return rotate(self.k_norm(k) if self.qk_norm else k, cos[..., None, :, :], sin[..., None, :, :]), v

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
        scores = scores.masked_fill(~see_BAL[:, None, :, None, :], -torch.inf)
        own = (q @ k.transpose(-1, -2)).transpose(1, 2)  # (B, Hkv, A, G·K, K)
        weights = torch.cat((scores, own), dim=-1).float().softmax(-1).to(q.dtype)
        length = ctx_k.shape[2]
        out = (weights[..., :length].flatten(2, 3) @ ctx_v).view(
            batch, self.kv_heads, anchors, groups * size, width
        )
        out = out + weights[..., length:] @ v.transpose(1, 2)
        out = out.view(batch, self.kv_heads, anchors, groups, size, width).permute(0, 2, 4, 1, 3, 5)
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


class BlockLayer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = BlockMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], see: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, see)
        return x + self.mlp(self.post_attention_layernorm(x))

    def draft(
        self, x: Tensor, cos: Tensor, sin: Tensor, ctx_k: Tensor, ctx_v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.self_attn.draft(self.input_layernorm(x), cos, sin, ctx_k, ctx_v, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """A low-rank bias on the logits from the token drafted just before (after DSpark's Markov head).

    z = W_z·silu(W_h·h_k + W_e·e(x_{k−1})), bias = z·B with B (r, Vd). Starts at zero; B starts at the head's leading
    directions, so that z acts as a correction of the hidden state.
    """

    def __init__(self, width: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, rank, bias=False)
        self.previous = nn.Linear(width, rank, bias=False)
        self.out = nn.Linear(rank, rank, bias=False)
        self.basis = nn.Parameter(torch.zeros(rank, vocabulary))

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Hidden state and embedding of the token before, both (…, D) → z (…, r)."""
        return self.out(self.mixed(self.hidden(hidden), previous))

    def mixed(self, from_hidden: Tensor, previous: Tensor) -> Tensor:
        """silu(W_h·h + W_e·e), given W_h·h: (…, r) and (…, D) → (…, r)."""
        return F.silu(from_hidden + self.previous(previous))


class ConfidenceHead(nn.Module):
    """σ(w·[h_k; e(x_{k−1})] + b), trained to the acceptance β_k = Σ min(p_k, q_k) = 1 − TV (DSpark's confidence head).

    It reads q's hidden states and changes nothing about q. Starts at 1/2.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(2 * width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Hidden state and embedding of the token before, both (…, D) → the logit (…)."""
        return self.out(torch.cat((hidden, previous), dim=-1))[..., 0]


@dataclass
class _Light:
    """What `BlockDrafter.lighten` keeps: the head's rows (Vd, D); the Markov basis times its last product (Vd, r)."""

    head_VdD: Tensor
    basis_Vr: Tensor | None


class BlockDrafter(nn.Module):
    """The network q. Its parameters are the trainable ones alone; the target is referred to, not owned."""

    draft_vocab: Tensor | None

    def __init__(self, config: BlockConfig, target: Target, draft_vocab: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self._target = [target]  # in a list, so that it is no submodule
        self.blocks = [BlockLayer(config) for _ in config.init_layer_ids]
        self.layers = nn.ModuleList(self.blocks)  # under their published names
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        taps = config.context == "taps"
        self.fc = nn.Linear(
            config.hidden_size * (len(config.target_layer_ids) if taps else 1), config.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("draft_vocab", draft_vocab, persistent=draft_vocab is not None)
        self.markov = (
            MarkovHead(config.hidden_size, config.markov_rank, self.draft_size)
            if config.markov_rank
            else None
        )
        self.confidence = ConfidenceHead(config.hidden_size) if config.confidence_head else None
        self._head: Tensor | None = None
        self._light: _Light | None = None

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def draft_size(self) -> int:
        """Vd: how many tokens the drafter can propose."""
        return self.config.draft_vocab_size or self.config.vocab_size

    @property
    def head_weight_VdD(self) -> Tensor:
        """The frozen head's rows for the draft vocabulary, (Vd, D)."""
        if self._head is None:
            weight = self.target.head_weight_VD.detach()
            self._head = weight if self.draft_vocab is None else weight[self.draft_vocab].contiguous()
        return self._head

    def _tables(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The target's own rotary tables for (rows, L) positions."""
        cos, sin = self.target.body.rotary_emb(x, positions)
        return cos, sin

    def _inputs(self, tokens: Tensor, hidden_before: Tensor) -> Tensor:
        """Blocks' tokens (…, K) and the target's state before each block (…, D) as input rows, (…, K, D)."""
        x = self.target.embed(tokens).detach()
        if self.config.context == "shared_kv":
            x = x + self.fc(self.hidden_norm(hidden_before))[..., None, :]
        return x

    def masked(self, tokens: Tensor, clean: Tensor | int = 0) -> Tensor:
        """Blocks (…, K), the anchor first, with MASK in place of all but the anchor and the `clean` (…) tokens after it."""
        steps = torch.arange(tokens.shape[-1], device=tokens.device)
        kept = steps <= (clean[..., None] if isinstance(clean, Tensor) else clean)
        return torch.where(kept, tokens, self.config.mask_token_id)

    def forward(
        self, batch: Batch, features: TargetFeatures, anchors: Anchors, clean_BA: Tensor | None = None
    ) -> Tensor:
        """Hidden states of all blocks, (B, A, K, D), ready for the head.

        `clean_BA`: how many tokens after its anchor each block shows; None = none of them.
        """
        index, size = anchors.index_BA, self.config.block_size
        rows = torch.arange(index.shape[0], device=index.device)[:, None]
        before = features.hidden_BLD[rows, (index - 1).clamp_min(0)]
        tokens = batch.tokens_BL[rows[..., None], anchors.places_BAK(batch.tokens_BL.shape[1])]
        x = self._inputs(self.masked(tokens, 0 if clean_BA is None else clean_BA), before)
        positions = batch.positions_BL[rows, index][..., None] + torch.arange(size, device=index.device)
        cos, sin = (t.unflatten(0, index.shape) for t in self._tables(x, positions.flatten(0, 1)))
        places = torch.arange(batch.tokens_BL.shape[1], device=index.device)
        see = (places < index[..., None]) & (
            batch.document_BL[:, None, :] == batch.document_BL[rows, index][..., None]
        )
        contexts = self._training_context(batch, features)
        for layer, context in zip(self.blocks, contexts, strict=True):
            x = layer(x, cos, sin, context, see)
        return self.norm(x)

    def _training_context(self, batch: Batch, features: TargetFeatures) -> list[tuple[Tensor, Tensor]]:
        if self.config.context == "shared_kv":
            return list(zip(features.keys, features.values, strict=True))
        assert features.taps_BLFD is not None
        return self.context_keys_values(features.taps_BLFD, batch.positions_BL)

    def context_keys_values(self, taps_BLFD: Tensor, positions_BL: Tensor) -> list[tuple[Tensor, Tensor]]:
        """`taps` context: each layer's keys and values of the fused features, (B, Hkv, L, d)."""
        fused = self.hidden_norm(self.fc(taps_BLFD.flatten(2)))
        cos, sin = self._tables(fused, positions_BL)
        return [layer.self_attn.keys_values(fused, cos, sin) for layer in self.blocks]

    def markov_factors(
        self, batch: Batch, anchors: Anchors, hidden_BAKD: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Teacher-forced low-rank bias of every row: (z (B, A, K, r), basis (r, Vd)), or None without a Markov head."""
        if self.markov is None:
            return None
        return self.markov(hidden_BAKD, self._previous(batch, anchors)), self.markov.basis

    def confidence_logits(self, batch: Batch, anchors: Anchors, hidden_BAKD: Tensor) -> Tensor | None:
        """Teacher-forced confidence of every row, (B, A, K), or None without that head. Its gradient stays there."""
        if self.confidence is None:
            return None
        return self.confidence(hidden_BAKD.detach(), self._previous(batch, anchors)).float()

    def _previous(self, batch: Batch, anchors: Anchors) -> Tensor:
        """Embeddings of the tokens before those that the rows predict, (B, A, K, D)."""
        rows = torch.arange(anchors.index_BA.shape[0], device=batch.tokens_BL.device)[:, None, None]
        previous = batch.tokens_BL[rows, anchors.places_BAK(batch.tokens_BL.shape[1])]
        return self.target.embed(previous).detach()

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits before any Markov bias, fp32, (…, D) → (…, Vd). Without gradients."""
        weight = self.head_weight_VdD.to(hidden.dtype) if self._light is None else self._light.head_VdD
        return few_rows(hidden.contiguous(), weight).float()

    @torch.no_grad()
    def lighten(self) -> None:
        """Make ready for drafting on a CPU, for good: weights in forms that few rows read fastest, rounded to bf16
        where that is half the price. Drafts may change by that rounding; the law of what is decoded does not."""
        target = self.target
        dtype = self.norm.weight.dtype
        if not speed_up_linears(self, dtype, target.device, light=True):
            return
        kept = torch.bfloat16 if fast_linear(dtype, target.device) is RowsLinear else dtype
        basis = None
        if self.markov is not None:  # one product less a token: basis ∘ out
            basis = (self.markov.basis.t() @ self.markov.out.weight.to(dtype)).to(kept).contiguous()
        self._light = _Light(self.head_weight_VdD.to(kept), basis)


class BlockSession:
    """One request's drafting state: the context that the drafter sees, kept in step with the target's cache.

    Call `observe` after every target forward whose first `kept` tokens are committed and in the cache; then `hidden`
    drafts after the cache's `length` positions. Batch of one.
    """

    def __init__(self, drafter: BlockDrafter, cache: KVCache, capacity: int) -> None:
        self.drafter, self.cache = drafter, cache
        self.before: Tensor | None = None
        config = drafter.config
        # by rows of the vocabulary: the layout that a product of one row reads fastest
        self.basis_Vr: Tensor | None = None
        if drafter.markov is not None:
            light = drafter._light
            self.basis_Vr = (
                drafter.markov.basis.detach().t().contiguous() if light is None else light.basis_Vr
            )
        self.own: KVCache | None = None
        if config.context == "taps":
            shape = (1, config.num_key_value_heads, capacity, config.head_dim)
            self.own = KVCache(
                len(drafter.layers), shape, drafter.norm.weight.dtype, drafter.norm.weight.device
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs `observe` needs."""
        return tuple(self.drafter.config.target_layer_ids) if self.own is not None else ()

    @torch.no_grad()
    def observe(self, hidden_BLD: Tensor, taps_BLFD: Tensor | None, kept: int) -> None:
        """Take in the first `kept` ≥ 1 positions of a target forward that are now committed."""
        dtype = self.drafter.norm.weight.dtype
        self.before = hidden_BLD[:, kept - 1].to(dtype)
        if self.own is not None:
            assert taps_BLFD is not None
            start = self.own.length
            positions = torch.arange(start, start + kept, device=hidden_BLD.device)[None]
            pairs = self.drafter.context_keys_values(taps_BLFD[:, :kept].to(dtype), positions)
            for layer, (k, v) in zip(self.own.slabs, pairs, strict=True):
                layer.update(k, v)
            self.own.advance(kept)

    @torch.no_grad()
    def hidden(self, last_token: int) -> Tensor:
        """Hidden states of the block that starts at `last_token`, which follows the cached context: (K, D)."""
        assert self.before is not None
        tokens = torch.full((1, self.drafter.config.block_size), last_token, device=self.before.device)
        return self.hidden_abreast(self.drafter.masked(tokens))[0]

    @torch.no_grad()
    def hidden_abreast(self, tokens_NK: Tensor) -> Tensor:
        """Hidden states of N blocks that all follow the cached context, in one pass: (N, K, D).

        They do not see one another; the keys of the context are there once, for all of them. `tokens_NK`: what
        `BlockDrafter.masked` leaves of them.
        """
        drafter, config = self.drafter, self.drafter.config
        assert self.before is not None
        count, size = tokens_NK.shape
        x = drafter._inputs(tokens_NK, self.before).flatten(0, 1)[None]
        start = self.cache.length if self.own is None else self.own.length
        positions = torch.arange(start, start + size, device=x.device).repeat(count)[None]
        cos, sin = drafter._tables(x, positions)
        mask = None
        if count > 1:
            block = torch.arange(count, device=x.device).repeat_interleave(size)
            groups = config.num_attention_heads // config.num_key_value_heads
            dtype = drafter.norm.weight.dtype
            mask = block_mask(block[:, None] == block, count * size, start, groups, dtype, x.device)
        for i, layer in enumerate(drafter.blocks):
            if self.own is None:
                ctx_k, ctx_v = (
                    self.cache.k(config.target_layer_ids[i]),
                    self.cache.v(config.target_layer_ids[i]),
                )
            else:
                ctx_k, ctx_v = self.own.k(i), self.own.v(i)
            x = layer.draft(x, cos, sin, ctx_k, ctx_v, mask)
        return drafter.norm(x)[0].view(count, size, -1)

    @torch.no_grad()
    def bias_inputs(self, hidden_KD: Tensor) -> Tensor | None:
        """What `bias` needs of all rows, computed at once: (K, r), or None without a Markov head."""
        markov = self.drafter.markov
        return None if markov is None else markov.hidden(hidden_KD)

    @torch.no_grad()
    def bias(self, input_r: Tensor, previous: Tensor) -> Tensor:
        """The Markov bias on one row's logits after each of the tokens `previous` (…): (…, Vd). `input_r`: the row's
        line of `bias_inputs`, or one line for each token (…, r)."""
        markov = self.drafter.markov
        assert markov is not None and self.basis_Vr is not None
        z = markov.mixed(input_r, self.drafter.target.embed(previous).to(input_r.dtype))
        # a lightened basis holds the last product already
        return few_rows(z if self.drafter._light is not None else markov.out(z), self.basis_Vr).float()

    @torch.no_grad()
    def confidence(self, hidden_D: Tensor, previous: Tensor) -> float:
        """How probably the draft of one row (D,) is accepted after the token `previous` (1,), 0..1, if those before it are."""
        head = self.drafter.confidence
        assert head is not None
        embedded = self.drafter.target.embed(previous).to(hidden_D.dtype)
        return float(head(hidden_D[None], embedded).sigmoid())
