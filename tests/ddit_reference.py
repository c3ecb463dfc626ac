"""A DDiT's forward written after the papers (SEDD, MDLM, RADD, BD3-LM): float64 in plain loops, none of this project's code."""

from __future__ import annotations

import math
from typing import Any

from specalign.models.ddit import DDiT


def dot(a: Any, b: Any) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def reference(
    net: DDiT, row: list[int], sigma: list[float], positions: list[int], see: list[list[bool]]
) -> list[list[float]]:
    """f for one row of tokens, from the state dict and the papers' formulas alone."""
    w = {name: t.double().tolist() for name, t in net.state_dict().items()}
    c = net.config
    heads, d = c.n_heads, c.hidden_size // c.n_heads
    adaptive = "sigma_map.mlp.0.weight" in w

    def linear(name: str, x: list[float]) -> list[float]:
        bias = w.get(f"{name}.bias") or [0.0] * len(w[f"{name}.weight"])
        return [dot(line, x) + b for line, b in zip(w[f"{name}.weight"], bias, strict=True)]

    def silu(x: list[float]) -> list[float]:
        return [v / (1 + math.exp(-v)) for v in x]

    def gelu(v: float) -> float:
        return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    def norm(name: str, x: list[float]) -> list[float]:
        mean = math.fsum(x) / len(x)
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in x) / len(x) + 1e-5)
        bias = w.get(f"{name}.bias") or [0.0] * len(x)
        return [
            (v - mean) / deviation * g + b
            for v, g, b in zip(x, w[f"{name}.weight"], bias, strict=True)
        ]

    def conditioning(s: float) -> list[float]:
        angles = [s * 10000 ** (-j / 128) for j in range(128)]
        waves = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        return silu(linear("sigma_map.mlp.2", silu(linear("sigma_map.mlp.0", waves))))

    def parts(name: str, condition: list[float] | None, count: int) -> list[list[float]]:
        if condition is None:
            return [
                [float(k % 3 == 2)] * c.hidden_size for k in range(count)
            ]  # shift 0, scale 0, gate 1
        flat = linear(f"{name}.adaLN_modulation", condition)
        return [flat[k * c.hidden_size : (k + 1) * c.hidden_size] for k in range(count)]

    def modulate(x: list[float], shift: list[float], scale: list[float]) -> list[float]:
        return [v * (1 + s) + t for v, t, s in zip(x, shift, scale, strict=True)]

    def turned(x: list[float], position: int) -> list[float]:
        out = [0.0] * d
        for j in range(d // 2):
            angle = position * 10000 ** (-2 * j / d)
            out[j] = x[j] * math.cos(angle) - x[j + d // 2] * math.sin(angle)
            out[j + d // 2] = x[j + d // 2] * math.cos(angle) + x[j] * math.sin(angle)
        return out

    def added(x: list[float], gate: list[float], y: list[float]) -> list[float]:
        return [a + g * b for a, g, b in zip(x, gate, y, strict=True)]

    conditions = [conditioning(s) if adaptive else None for s in sigma]
    length = len(row)
    x = [list(w["vocab_embed.embedding"][token]) for token in row]
    for i in range(c.n_blocks):
        b = f"blocks.{i}"
        modulation = [parts(b, condition, 6) for condition in conditions]
        qkv = [
            linear(f"{b}.attn_qkv", modulate(norm(f"{b}.norm1", x[t]), *modulation[t][:2]))
            for t in range(length)
        ]
        attended: list[list[float]] = [[] for _ in row]
        for h in range(heads):
            q, k, v = (
                [line[(part * heads + h) * d : (part * heads + h + 1) * d] for line in qkv]
                for part in range(3)
            )
            q, k = ([turned(line, positions[t]) for t, line in enumerate(side)] for side in (q, k))
            for t in range(length):
                allowed = [s for s in range(length) if see[t][s]]
                scores = [dot(q[t], k[s]) / math.sqrt(d) for s in allowed]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                total = math.fsum(weights)
                attended[t] += [
                    math.fsum(weight * v[s][j] for weight, s in zip(weights, allowed, strict=True))
                    / total
                    for j in range(d)
                ]
        for t in range(length):
            x[t] = added(x[t], modulation[t][2], linear(f"{b}.attn_out", attended[t]))
            inner = linear(f"{b}.mlp.0", modulate(norm(f"{b}.norm2", x[t]), *modulation[t][3:5]))
            x[t] = added(x[t], modulation[t][5], linear(f"{b}.mlp.2", [gelu(u) for u in inner]))
    out = []
    for t in range(length):
        final = norm("output_layer.norm_final", x[t])
        out.append(
            linear(
                "output_layer.linear", modulate(final, *parts("output_layer", conditions[t], 2)[:2])
            )
        )
    return out
