"""The DDiT's config and layers, under their published names."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.common.errors import UserError
from specalign.common.schema import finite
from specalign.lm.attention import attend, rotate
from specalign.lm.slabs import Slab

_SINUSOIDS = 256
_MAX_PERIOD = 10_000.0
_ROTARY_BASE = 10_000.0
_MLP_RATIO = 4


@dataclass
class DDiTConfig:
    """The architecture; sizes under their published names.

    time_input: `sigma` = adaLN on the total noise σ; `zero` = the same fed σ = 0 always (MDLM's
    time_conditioning=false). scale_by_sigma: the log-score is f − log(e^σ−1) − log(V−1) (SEDD,
    absorbing). attention: `full`; `prefix_causal`: clean tokens see their past.
    """

    vocab_size: int
    hidden_size: int
    n_blocks: int
    n_heads: int
    cond_dim: int = 128
    dropout: float = 0.1
    time_input: Literal["sigma", "zero"] = "sigma"
    scale_by_sigma: bool = False
    attention: Literal["full", "prefix_causal"] = "full"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "n_blocks", "n_heads", "cond_dim")
        fits = {
            name: type(getattr(self, name)) is int and getattr(self, name) > 0 for name in sizes
        }
        fits["dropout"] = finite(self.dropout) and 0 <= self.dropout < 1
        fits["time_input"] = self.time_input in ("sigma", "zero")
        fits["attention"] = self.attention in ("full", "prefix_causal")
        for name, valid in fits.items():
            if not valid:
                raise UserError(f"ddit config: {name}={getattr(self, name)!r:.60} is not valid")
        if self.hidden_size % (2 * self.n_heads):
            given = f"hidden_size={self.hidden_size}, n_heads={self.n_heads}"
            raise UserError(f"ddit config: {given}: the heads' width must be even")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_heads


class DDiTNorm(nn.Module):
    """LayerNorm in fp32, ε = 1e-5, without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float()).to(x.dtype)


class VocabEmbedding(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab_size, width))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)


class SigmaMap(nn.Module):
    """σ (…) → (…, cond_dim): 256 sinusoids, cosines first, and a small MLP."""

    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(_SINUSOIDS, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim)
        )

    def forward(self, sigma: Tensor) -> Tensor:
        half = _SINUSOIDS // 2
        steps = torch.arange(half, dtype=torch.float32, device=sigma.device)
        angles = sigma.float()[..., None] * torch.exp(-math.log(_MAX_PERIOD) / half * steps)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        bias = self.mlp[0].get_parameter("bias")  # the weight may be kept in bf16 for rows in fp32
        return self.mlp(waves.to(bias.dtype))


class Rotary(nn.Module):
    """Rotary tables in fp32. `inv_freq` is a buffer because checkpoints have it."""

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("inv_freq", self.frequencies())

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        return 1.0 / _ROTARY_BASE ** (steps / self.head_dim)

    def forward(self, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (B, 1, L, d). Not from the buffer, which half precision rounds."""
        angles = positions_BL[:, None, :, None].float() * self.frequencies(positions_BL.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _zero_linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class DDiTBlock(nn.Module):
    """Pre-norm attention and MLP, modulated by σ (adaLN)."""

    def __init__(self, config: DDiTConfig, backend: str) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.dropout, self.backend = config.n_heads, config.dropout, backend
        self.norm1 = DDiTNorm(width)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.norm2 = DDiTNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, _MLP_RATIO * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(_MLP_RATIO * width, width),
        )
        self.adaLN_modulation = _zero_linear(config.cond_dim, 6 * width)

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        slab: Slab | None,
    ) -> Tensor:
        """`condition`: (B, 1 or L, cond_dim). `slab`: cached keys and values, to be extended."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaLN_modulation(condition).chunk(
            6, dim=-1
        )
        attended = self._attention(_modulate(self.norm1(x), shift, scale), rotary, mask, slab)
        x = x + gate * self._drop(attended)
        return x + mlp_gate * self._drop(self.mlp(_modulate(self.norm2(x), mlp_shift, mlp_scale)))

    def _attention(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, slab: Slab | None
    ) -> Tensor:
        q, k, v = self.attn_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(t.float(), *rotary).to(v.dtype) for t in (q, k))
        if slab is not None:
            k, v = slab.update(k, v)
        return self.attn_out(attend(q, k, v, mask, self.backend).transpose(1, 2).flatten(2))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class DDiTHead(nn.Module):
    """Final norm, modulated, and the untied output projection, which starts at zero."""

    def __init__(self, config: DDiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm_final = DDiTNorm(width)
        self.linear = _zero_linear(width, config.vocab_size)
        self.adaLN_modulation = _zero_linear(config.cond_dim, 2 * width)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        modulation = self.adaLN_modulation(condition).chunk(2, dim=-1)
        return self.linear(_modulate(self.norm_final(hidden), *modulation))
