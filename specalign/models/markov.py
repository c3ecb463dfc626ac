"""Markov heads: a low-rank bias on a block's draft logits from the token drafted just before (after
DSpark, arXiv 2607.05147).

Every kind computes z (…, r) and adds z·B, B the basis (r, Vd), which starts at the head's leading
directions; the bias starts at zero. What depends only on the hidden state is computed for all rows
of a block at once (`inputs`), the rest when the previous token is known (`mix`). h: hidden state;
e(x): the target's embedding; T: a table with a row for each of the target's tokens.

| kind | z | in DSpark's format |
|---|---|---|
| `silu` | W_z·silu(W_h·h + W_e·e(x)) | not supported |
| `tanh` | W_z·tanh(W_h·h + W_e·e(x)) | `rnn`, its state never read |
| `linear` | W_e·e(x) | `vanilla` |
| `vanilla` | T[x] | `vanilla` |
| `gated` | σ(W_h·h + W_t·T[x]) ⊙ T[x] | `gated` |
| `rnn` | tanh(W_h·h + W_t·T[x]) | `rnn`, its state never read |

`gated` and `rnn` of another engine may have a bias in W_h (`markov_bias`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Embed = Callable[[Tensor], Tensor]
"""Token ids (…) → the target's embeddings (…, D)."""
KINDS = ("silu", "tanh", "linear", "vanilla", "gated", "rnn")
TABLES = ("vanilla", "gated", "rnn")
"""Kinds with a row for each of the target's tokens."""


class MarkovHead(nn.Module):
    """What the kinds have in common: the basis over `vocabulary` tokens.

    hidden: the layer of the hidden state, where z depends on it. out: the last layer if it is
    linear, (r, r). silent: the layers that start at zero, so that z does.
    """

    hidden: nn.Linear | None
    out: nn.Linear | None
    silent: tuple[str, ...] = ()

    def __init__(self, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.hidden = None
        self.out = None
        self.basis = nn.Parameter(torch.zeros(rank, vocabulary))

    def inputs(self, hidden: Tensor) -> Tensor:
        """What `mix` needs of hidden states, (…, D) → (…, any width)."""
        return hidden[..., :0] if self.hidden is None else self.hidden(hidden)

    def mix(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        """From `inputs` and the previous tokens (…) → (…, r), before `out`."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        """Hidden states (…, D) and previous tokens (…) → z (…, r)."""
        return self.finish(self.mix(self.inputs(hidden), previous, embed))

    def finish(self, mixed: Tensor) -> Tensor:
        return mixed if self.out is None else self.out(mixed)

    @torch.no_grad()
    def basis_Vr(self, folded: bool = False) -> Tensor:
        """The basis with a row for each token, (Vd, r); `folded`: with `out` multiplied in."""
        basis_Vr = self.basis.detach().t()
        if folded and self.out is not None:
            basis_Vr = basis_Vr @ self.out.weight.to(self.basis.dtype)
        return basis_Vr.contiguous()


class MixedHead(MarkovHead):
    silent = ("out",)

    def __init__(self, width: int, rank: int, vocabulary: int, activation: str) -> None:
        super().__init__(rank, vocabulary)
        self.activation = activation
        self.hidden = nn.Linear(width, rank, bias=False)
        self.previous = nn.Linear(width, rank, bias=False)
        self.out = nn.Linear(rank, rank, bias=False)

    def mix(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        mixed = inputs + self.previous(embed(previous).to(inputs.dtype))
        return mixed.tanh() if self.activation == "tanh" else F.silu(mixed)


class LinearHead(MarkovHead):
    silent = ("previous",)

    def __init__(self, width: int, rank: int, vocabulary: int) -> None:
        super().__init__(rank, vocabulary)
        self.previous = nn.Linear(width, rank, bias=False)

    def mix(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        return self.previous(embed(previous).to(inputs.dtype))


class VanillaHead(MarkovHead):
    silent: tuple[str, ...] = ("table",)

    def __init__(self, rank: int, vocabulary: int, target_vocabulary: int) -> None:
        super().__init__(rank, vocabulary)
        self.table = nn.Embedding(target_vocabulary, rank)

    def mix(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        return self.table(previous)


class GatedHead(VanillaHead):
    """`bias`: W_h has one."""

    hidden: nn.Linear

    def __init__(
        self, width: int, rank: int, vocabulary: int, target_vocabulary: int, bias: bool = False
    ) -> None:
        super().__init__(rank, vocabulary, target_vocabulary)
        self.hidden = nn.Linear(width, rank, bias=bias)
        self.previous = nn.Linear(rank, rank, bias=False)

    def mix(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        row = self.table(previous)
        return torch.sigmoid(inputs + self.previous(row)) * row


class RNNHead(GatedHead):
    silent = ("table", "hidden")

    def mix(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        return torch.tanh(inputs + self.previous(self.table(previous)))


def markov_head(
    kind: str, width: int, rank: int, vocabulary: int, target_vocabulary: int, bias: bool = False
) -> MarkovHead:
    """A head of one of `KINDS`, "" = silu, not yet initialised; `bias`: of gated and rnn."""
    if kind == "linear":
        return LinearHead(width, rank, vocabulary)
    if kind == "vanilla":
        return VanillaHead(rank, vocabulary, target_vocabulary)
    if kind == "gated":
        return GatedHead(width, rank, vocabulary, target_vocabulary, bias)
    if kind == "rnn":
        return RNNHead(width, rank, vocabulary, target_vocabulary, bias)
    return MixedHead(width, rank, vocabulary, "tanh" if kind == "tanh" else "silu")
