"""Markov heads: a low-rank bias on a block's draft logits from the token drafted just before (after DSpark, arXiv 2607.05147).

Every kind computes z (…, r) and adds z·B, B the basis (r, Vd). They start with a bias of zero; B starts at the head's leading
directions, so that z acts as a correction of the hidden state. What depends on the hidden state alone is computed for all rows
of a block at once (`inputs`), the rest when the token before is known (`mixed`). h: hidden state; e(x): the target's embedding;
T: a table with a row for each of the target's tokens. `dspark_tensors` writes a head as DSpark's engines read it:

| kind | z | in DSpark's format |
|---|---|---|
| `silu` | W_z·silu(W_h·h + W_e·e(x)) | nothing that holds it |
| `mlp` | W_z·silu(W_m·silu(W_h·h + W_e·e(x))) | nothing that holds it |
| `tanh` | W_z·tanh(W_h·h + W_e·e(x)) | `rnn`, its state never read |
| `linear` | W_e·e(x) | `vanilla` |
| `vanilla` | T[x] | `vanilla` |
| `gated` | σ(W_h·h + W_t·T[x]) ⊙ T[x] | `gated` |
| `rnn` | tanh(W_h·h + W_t·T[x]) | `rnn`, its state never read |

`gated` and `rnn` of another engine may have a bias beside W_h (`markov_bias`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from align.common.errors import UserError

Embed = Callable[[Tensor], Tensor]
"""Token ids (…) → the target's embeddings (…, D)."""


class MarkovHead(nn.Module, ABC):
    """What the kinds have in common."""

    basis: nn.Parameter
    out: nn.Linear | None
    """The last layer where it is linear, (r, r): it can be multiplied into the basis."""

    @abstractmethod
    def inputs(self, hidden: Tensor) -> Tensor:
        """What `mixed` needs of hidden states, (…, D) → (…, any width)."""

    @abstractmethod
    def mixed(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        """From `inputs` and the tokens before (…) → (…, r), before `out`."""

    @abstractmethod
    def silence(self) -> None:
        """Make z zero, whatever it is given."""

    def forward(self, hidden: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        """Hidden states (…, D) and tokens before (…) → z (…, r)."""
        return self.finish(self.mixed(self.inputs(hidden), previous, embed))

    def finish(self, mixed: Tensor) -> Tensor:
        """`mixed` → z, both (…, r)."""
        return mixed if self.out is None else self.out(mixed)

    @torch.no_grad()
    def basis_Vr(self, folded: bool = False) -> Tensor:
        """The basis with a line for each vocabulary entry, (Vd, r); `folded`: with `out` multiplied in."""
        basis_Vr = self.basis.detach().t()
        if folded and self.out is not None:
            basis_Vr = basis_Vr @ self.out.weight.to(self.basis.dtype)
        return basis_Vr.contiguous()


class MixedHead(MarkovHead):
    """z = W_z·φ(W_h·h + W_e·e(x)), φ the `activation`: `silu` or `tanh`."""

    out: nn.Linear

    def __init__(self, width: int, rank: int, vocabulary: int, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.hidden = nn.Linear(width, rank, bias=False)
        self.previous = nn.Linear(width, rank, bias=False)
        self.out = nn.Linear(rank, rank, bias=False)
        self.basis = nn.Parameter(torch.zeros(rank, vocabulary))

    def inputs(self, hidden: Tensor) -> Tensor:
        return self.hidden(hidden)

    def mixed(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        mixed = inputs + self.previous(embed(previous).to(inputs.dtype))
        return mixed.tanh() if self.activation == "tanh" else F.silu(mixed)

    @torch.no_grad()
    def silence(self) -> None:
        self.out.weight.zero_()


class MLPHead(MixedHead):
    """z = W_z·silu(W_m·silu(W_h·h + W_e·e(x))), W_h·h of the width `inner`."""

    def __init__(self, width: int, rank: int, vocabulary: int, inner: int) -> None:
        super().__init__(width, rank, vocabulary)
        self.hidden = nn.Linear(width, inner, bias=False)
        self.previous = nn.Linear(width, inner, bias=False)
        self.middle = nn.Linear(inner, rank, bias=False)

    def mixed(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        return F.silu(self.middle(super().mixed(inputs, previous, embed)))


class LinearHead(MarkovHead):
    """z = W_e·e(x): a vanilla head whose table is a linear function of the target's embedding. W_e starts at zero."""

    def __init__(self, width: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.out = None
        self.previous = nn.Linear(width, rank, bias=False)
        self.basis = nn.Parameter(torch.zeros(rank, vocabulary))

    def inputs(self, hidden: Tensor) -> Tensor:
        return hidden[..., :0]

    def mixed(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        return self.previous(embed(previous).to(inputs.dtype))

    @torch.no_grad()
    def silence(self) -> None:
        self.previous.weight.zero_()


class VanillaHead(MarkovHead):
    """z = T[x]: DSpark's vanilla head, which does not look at the hidden state. T starts at zero."""

    def __init__(self, rank: int, vocabulary: int, target_vocabulary: int) -> None:
        super().__init__()
        self.out = None
        self.table = nn.Embedding(target_vocabulary, rank)
        self.basis = nn.Parameter(torch.zeros(rank, vocabulary))

    def inputs(self, hidden: Tensor) -> Tensor:
        return hidden[..., :0]

    def mixed(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        return self.table(previous)

    @torch.no_grad()
    def silence(self) -> None:
        self.table.weight.zero_()


class GatedHead(VanillaHead):
    """z = σ(W_h·h + W_t·T[x]) ⊙ T[x]: DSpark's gated head; `bias`: W_h has one."""

    def __init__(
        self, width: int, rank: int, vocabulary: int, target_vocabulary: int, bias: bool = False
    ) -> None:
        super().__init__(rank, vocabulary, target_vocabulary)
        self.hidden = nn.Linear(width, rank, bias=bias)
        self.previous = nn.Linear(rank, rank, bias=False)

    def inputs(self, hidden: Tensor) -> Tensor:
        return self.hidden(hidden)

    def mixed(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        row = self.table(previous)
        return torch.sigmoid(inputs + self.previous(row)) * row


class RNNHead(GatedHead):
    """z = tanh(W_h·h + W_t·T[x]): DSpark's rnn head where its output does not read the state. T and W_h start at zero."""

    def mixed(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        return torch.tanh(inputs + self.previous(self.table(previous)))

    @torch.no_grad()
    def silence(self) -> None:
        for parameter in (*self.table.parameters(), *self.hidden.parameters()):
            parameter.zero_()


KINDS = ("silu", "tanh", "linear", "mlp", "vanilla", "gated", "rnn")
TABLES = ("vanilla", "gated", "rnn")
"""Those with a row for each of the target's tokens."""
OLD_NAMES = {"mixed": "silu", "table": "vanilla"}
"""What kinds were called in files and recipes of old."""


def markov_head(
    kind: str,
    width: int,
    rank: int,
    inner: int,
    vocabulary: int,
    target_vocabulary: int,
    bias: bool = False,
) -> MarkovHead:
    """A head of one of `KINDS`, `silu` for another name, its weights not yet initialised.

    Args:
        width: D. rank: r. inner: width of the first layer of an mlp; 0 = twice the rank. vocabulary: Vd.
        target_vocabulary: V. bias: of gated and rnn.
    """
    if kind == "linear":
        return LinearHead(width, rank, vocabulary)
    if kind == "vanilla":
        return VanillaHead(rank, vocabulary, target_vocabulary)
    if kind == "gated":
        return GatedHead(width, rank, vocabulary, target_vocabulary, bias)
    if kind == "rnn":
        return RNNHead(width, rank, vocabulary, target_vocabulary, bias)
    if kind == "mlp":
        return MLPHead(width, rank, vocabulary, inner or 2 * rank)
    return MixedHead(width, rank, vocabulary, "tanh" if kind == "tanh" else "silu")


@dataclass(frozen=True)
class DSparkHead:
    """A Markov head, and a confidence head beside it, in DSpark's terms.

    kind: `markov_head_type`: `vanilla`, `gated` or `rnn`. rank: `markov_rank`, r or, for the confidence head's sake, r + 1.
    tensors: by published name, fp32; `markov_head.markov_w1.weight` (V, rank), `markov_head.markov_w2.weight` (Vd, rank),
    `markov_head.gate_proj.*`, `markov_head.joint_proj.*`, `confidence_head.proj.*`.
    """

    kind: str
    rank: int
    tensors: dict[str, Tensor]


@torch.no_grad()
def dspark_tensors(
    markov: MarkovHead | None,
    embedding_VD: Tensor,
    vocabulary: int,
    confidence: nn.Linear | None = None,
    confidence_input: str = "",
) -> DSparkHead:
    """A drafter's heads as the tensors of DSpark's format (arXiv 2607.05147), which compute the same numbers up to rounding.

    vanilla: bias = W2·W1[x]; gated: W2·(σ(W_g·[h; W1[x]]) ⊙ W1[x]); rnn: W2·tanh(W_j·[state; W1[x]; h]), of W_j's rows (gate,
    candidate, output) the last third, whose columns of the state are zero here. A confidence head's share of e(x) becomes one
    column more in W1, which W2 does not read.

    Args:
        markov: None = no such head: a vanilla one of rank 1 whose bias is zero.
        embedding_VD: what `Target.embed` gives for each token, (V, D). vocabulary: Vd, the draft vocabulary's size.
        confidence: the linear layer of a `ConfidenceHead`, over h and what `BlockConfig.confidence_input` names: e(x), or what DSpark's
            own head reads.

    Raises:
        UserError: a kind that DSpark's format does not hold (`silu`, `mlp`).
    """
    embedding_VD = embedding_VD.float()
    kind, w1, w2 = _tables(markov, embedding_VD, vocabulary)
    rank, width, tensors = w1.shape[1], embedding_VD.shape[1], dict[str, Tensor]()
    if confidence is not None and confidence_input:
        tensors["confidence_head.proj.weight"] = confidence.weight.float().clone()
        tensors["confidence_head.proj.bias"] = confidence.bias.float().clone()
    elif confidence is not None:
        share = confidence.weight[0].float()
        column = embedding_VD @ share[width:, None]
        w1, w2 = (column, w2) if markov is None else (torch.cat((w1, column), dim=1), F.pad(w2, (0, 1)))
        reads = w1.new_zeros(1, w1.shape[1])
        reads[0, -1] = 1
        tensors["confidence_head.proj.weight"] = torch.cat((share[None, :width], reads), dim=1)
        tensors["confidence_head.proj.bias"] = confidence.bias.float().clone()
    size = w1.shape[1]
    tensors["markov_head.markov_w1.weight"] = w1.contiguous()
    tensors["markov_head.markov_w2.weight"] = w2.contiguous()
    if kind == "gated":  # columns: h, W1[x]
        assert isinstance(markov, GatedHead)
        weight, bias = w1.new_zeros(size, width + size), w1.new_zeros(size)
        weight[:rank, :width] = markov.hidden.weight
        weight[:rank, width : width + rank] = markov.previous.weight
        if markov.hidden.bias is not None:
            bias[:rank] = markov.hidden.bias
        tensors |= {"markov_head.gate_proj.weight": weight, "markov_head.gate_proj.bias": bias}
    if kind == "rnn":  # columns: state, W1[x], h; rows: gate, candidate, output
        assert isinstance(markov, MixedHead | RNNHead)
        weight, bias = w1.new_zeros(3 * size, 2 * size + width), w1.new_zeros(3 * size)
        output = weight[2 * size :]
        if isinstance(markov, MixedHead):
            output[:rank, size : size + rank].fill_diagonal_(1)
        else:
            output[:rank, size : size + rank] = markov.previous.weight
        output[:rank, 2 * size :] = markov.hidden.weight
        if markov.hidden.bias is not None:
            bias[2 * size : 2 * size + rank] = markov.hidden.bias
        tensors |= {"markov_head.joint_proj.weight": weight, "markov_head.joint_proj.bias": bias}
    return DSparkHead(kind, size, tensors)


def _tables(markov: MarkovHead | None, embedding_VD: Tensor, vocabulary: int) -> tuple[str, Tensor, Tensor]:
    """DSpark's kind, W1 (V, r) and W2 (Vd, r) of a head."""
    if markov is None:
        return "vanilla", embedding_VD.new_zeros(len(embedding_VD), 1), embedding_VD.new_zeros(vocabulary, 1)
    if isinstance(markov, VanillaHead):
        kind = (
            "rnn" if isinstance(markov, RNNHead) else "gated" if isinstance(markov, GatedHead) else "vanilla"
        )
        return kind, markov.table.weight.detach().float().clone(), markov.basis_Vr().float()
    if isinstance(markov, LinearHead):
        return "vanilla", embedding_VD @ markov.previous.weight.float().T, markov.basis_Vr().float()
    if isinstance(markov, MixedHead) and markov.activation == "tanh":
        w1 = embedding_VD @ markov.previous.weight.float().T
        return "rnn", w1, markov.basis_Vr(folded=True).float()
    name = "mlp" if isinstance(markov, MLPHead) else "silu"
    raise UserError(
        f"drafter.markov={name}: DSpark's format has no such head; train with drafter.markov=tanh, linear, vanilla or gated, "
        "or drafter.markov_rank=0"
    )
