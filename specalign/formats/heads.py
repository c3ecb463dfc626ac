"""DSpark's Markov and confidence heads (arXiv 2607.05147) as the weights of this project's own
(`specalign.models.markov`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from specalign.common.errors import UserError

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@dataclass
class Heads:
    """settings: those of `BlockConfig`; tensors: by this project's names."""

    settings: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Source:
    """Tensors of a folder, which are taken out. where: the file, for messages."""

    tensors: dict[str, Tensor]
    where: str

    def take(self, name: str, *shape: int) -> Tensor:
        """Raises UserError if it is missing or of another shape; −1 = any size."""
        if name not in self.tensors:
            raise UserError(f"{self.where} misses {name!r}")
        tensor = self.tensors.pop(name)
        found = tuple(tensor.shape)
        fits = len(found) == len(shape) and all(
            w in (-1, f) for f, w in zip(found, shape, strict=True)
        )
        if not fits:
            expected = ", ".join("any" if width < 0 else str(width) for width in shape)
            raise UserError(f"{self.where}: {name} has shape {found}, expected ({expected})")
        return tensor


def take_heads(
    tensors: dict[str, Tensor], settings: dict[str, Any], width: int, path: Path
) -> Heads:
    """Take the heads' tensors out of a folder's.

    vanilla: bias = W2·W1[x]; gated: W2·(σ(W_g·[h; W1[x]] + b) ⊙ W1[x]); rnn: W2·tanh(W_j·[state;
    W1[x]; h] + b), of W_j's rows (gate, candidate, output) the last third. The state of the drafts
    before is not carried here: an rnn whose output reads it is refused.

    Args:
        settings: `markov_rank`, `markov` (DSpark's kind), `confidence_head`, `confidence_input`.
            width: D.

    Raises:
        UserError: a missing tensor, one of another shape, or a head that is not computed here.
    """
    source = _Source(tensors, f"{path}/model.safetensors")
    rank, kind = settings.get("markov_rank", 0), settings.get("markov", "")
    reads_markov = settings.get("confidence_input") == "markov"
    found = Heads()
    if rank:
        w1, w2 = source.take(W1, -1, rank), source.take(W2, -1, rank)
        if kind == "vanilla" and not reads_markov and not bool(w2.any()):
            rank = 0  # a bias of zeros
        else:
            found.tensors |= {"markov.table.weight": w1, "markov.basis": w2.t().contiguous()}
    if rank and kind != "vanilla":
        found.tensors |= _take_mixing(source, kind, rank, width)
        if bool(found.tensors["markov.hidden.bias"].any()):
            found.settings["markov_bias"] = True
        else:
            del found.tensors["markov.hidden.bias"]
    found.settings |= {"markov_rank": rank, "markov": kind if rank else ""}
    if settings.get("confidence_head"):
        size = width + (rank if reads_markov else 0)
        found.tensors["confidence.out.weight"] = source.take("confidence_head.proj.weight", 1, size)
        found.tensors["confidence.out.bias"] = source.take("confidence_head.proj.bias", 1)
    return found


def _take_mixing(source: _Source, kind: str, rank: int, width: int) -> dict[str, Tensor]:
    """What a gated or an rnn head computes of hidden state and table."""
    if kind == "gated":  # columns: h, W1[x]
        weight = source.take("markov_head.gate_proj.weight", rank, width + rank)
        bias = source.take("markov_head.gate_proj.bias", rank)
        hidden, table = weight.split((width, rank), dim=1)
    else:  # columns: state, W1[x], h; rows: gate, candidate, output
        name = "markov_head.joint_proj"
        weight = source.take(f"{name}.weight", 3 * rank, 2 * rank + width)
        bias = source.take(f"{name}.bias", 3 * rank)[2 * rank :]
        state, table, hidden = weight[2 * rank :].split((rank, rank, width), dim=1)
        if bool(state.any()):
            raise UserError(
                f"{source.where}: {name}.weight: its output reads the state of the drafts before, "
                "which is not "
                "carried here"
            )
    return {
        "markov.hidden.weight": hidden.contiguous(),
        "markov.hidden.bias": bias.contiguous(),
        "markov.previous.weight": table.contiguous(),
    }
