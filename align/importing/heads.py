"""DSpark's Markov and confidence heads (arXiv 2607.05147) as the weights of this project's own (`align.models.markov`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from align.common.errors import UserError

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@dataclass
class Heads:
    """settings: what `BlockConfig` is to say of them; tensors: by this project's names."""

    settings: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def take_heads(tensors: dict[str, Tensor], settings: dict[str, Any], width: int, path: Path) -> Heads:
    """Take the heads' tensors out of a folder's.

    vanilla: bias = W2·W1[x]; gated: W2·(σ(W_g·[h; W1[x]] + b) ⊙ W1[x]); rnn: W2·tanh(W_j·[state; W1[x]; h] + b), of W_j's rows
    (gate, candidate, output) the last third. The state of the drafts before is not carried here: an rnn whose output reads it is
    refused, one whose columns of it are zero is `rnn` without state.

    Args:
        settings: `markov_rank`, `markov` (DSpark's kind), `confidence_head`, `confidence_input`. width: D.

    Raises:
        UserError: a tensor that is missing or of another shape, or a head that is not computed here.
    """
    where = f"{path}/model.safetensors"
    rank, kind = settings.get("markov_rank", 0), settings.get("markov", "")
    found = Heads()
    reads_markov = settings.get("confidence_input") == "markov"
    if rank:
        w1, w2 = _taken(tensors, W1, where), _taken(tensors, W2, where)
        _check(w1, (*w1.shape[:1], rank), W1, where)
        _check(w2, (*w2.shape[:1], rank), W2, where)
        if kind == "vanilla" and not reads_markov and not bool(w2.any()):
            rank = 0  # a head that says nothing
        else:
            found.tensors |= {"markov.table.weight": w1, "markov.basis": w2.t().contiguous()}
            if kind != "vanilla":
                found.tensors |= _mixing(tensors, kind, rank, width, where)
                if not bool(found.tensors["markov.hidden.bias"].any()):
                    del found.tensors["markov.hidden.bias"]
                else:
                    found.settings["markov_bias"] = True
    found.settings |= {"markov_rank": rank, "markov": kind if rank else ""}
    if settings.get("confidence_head"):
        weight = _taken(tensors, "confidence_head.proj.weight", where)
        _check(weight, (1, width + (rank if reads_markov else 0)), "confidence_head.proj.weight", where)
        bias = _taken(tensors, "confidence_head.proj.bias", where)
        found.tensors |= {"confidence.out.weight": weight, "confidence.out.bias": bias}
    return found


def _mixing(tensors: dict[str, Tensor], kind: str, rank: int, width: int, where: str) -> dict[str, Tensor]:
    """What a gated or an rnn head computes of hidden state and table."""
    name = "markov_head.gate_proj" if kind == "gated" else "markov_head.joint_proj"
    weight, bias = _taken(tensors, f"{name}.weight", where), _taken(tensors, f"{name}.bias", where)
    if kind == "gated":  # columns: h, W1[x]
        _check(weight, (rank, width + rank), f"{name}.weight", where)
        hidden, table = weight[:, :width], weight[:, width:]
    else:  # columns: state, W1[x], h
        _check(weight, (3 * rank, 2 * rank + width), f"{name}.weight", where)
        state, table, hidden = weight[2 * rank :].split((rank, rank, width), dim=1)
        bias = bias[2 * rank :]
        if bool(state.any()):
            raise UserError(
                f"{where}: {name}.weight: its output reads the state of the drafts before, which is not carried here"
            )
    return {
        "markov.hidden.weight": hidden.contiguous(),
        "markov.hidden.bias": bias.contiguous(),
        "markov.previous.weight": table.contiguous(),
    }


def _taken(tensors: dict[str, Tensor], name: str, where: str) -> Tensor:
    if name not in tensors:
        raise UserError(f"{where} misses {name!r}")
    return tensors.pop(name)


def _check(tensor: Tensor, shape: tuple[int, ...], name: str, where: str) -> None:
    if tuple(tensor.shape) != shape:
        raise UserError(f"{where}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
