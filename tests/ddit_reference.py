"""A DDiT's forward written after the papers (SEDD, MDLM, RADD, BD3-LM): float64, one head and one place at a time, none of this project's code."""

import math

import torch
from torch import Tensor

from specalign.models.ddit import DDiT


def reference(net: DDiT, row: Tensor, sigma: Tensor, positions: Tensor, see: Tensor) -> Tensor:
    """f (L, V) for one row of tokens, from the state dict and the papers' formulas alone. sigma, positions: (L,); see: (L, L)."""
    w = {name: t.double() for name, t in net.state_dict().items()}
    c, length = net.config, len(row)
    d = c.hidden_size // c.n_heads

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)

    def parts(name: str, count: int) -> list[Tensor]:
        if condition is None:  # shift 0, scale 0, gate 1
            return [torch.full((length, 1), float(k % 3 == 2)) for k in range(count)]
        return list(linear(f"{name}.adaLN_modulation", condition).split(c.hidden_size, -1))

    def turned(x: Tensor) -> Tensor:
        angles = positions[:, None] * 10000 ** (-2 * torch.arange(d // 2).double() / d)
        a, b = x[:, : d // 2], x[:, d // 2 :]
        return torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), 1
        )

    condition = None
    if "sigma_map.mlp.0.weight" in w:
        angles = sigma.double()[:, None] * 10000 ** (-torch.arange(128).double() / 128)
        waves = torch.cat((angles.cos(), angles.sin()), -1)
        condition = silu(linear("sigma_map.mlp.2", silu(linear("sigma_map.mlp.0", waves))))
    x = w["vocab_embed.embedding"][row]
    for i in range(c.n_blocks):
        b = f"blocks.{i}"
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts(b, 6)
        qkv = linear(f"{b}.attn_qkv", norm(f"{b}.norm1", x) * (1 + scale) + shift)
        heads = []
        for h in range(c.n_heads):
            q, k, v = (qkv[:, (part * c.n_heads + h) * d :][:, :d] for part in range(3))
            scores = turned(q) @ turned(k).T / math.sqrt(d)
            weights = torch.where(see, scores.exp(), 0.0)
            heads.append(weights / weights.sum(-1, keepdim=True) @ v)
        x = x + gate * linear(f"{b}.attn_out", torch.cat(heads, 1))
        inner = linear(f"{b}.mlp.0", norm(f"{b}.norm2", x) * (1 + mlp_scale) + mlp_shift)
        x = x + mlp_gate * linear(f"{b}.mlp.2", gelu(inner))
    shift, scale = parts("output_layer", 2)
    return linear("output_layer.linear", norm("output_layer.norm_final", x) * (1 + scale) + shift)
