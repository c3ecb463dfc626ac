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

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Embed = Callable[[Tensor], Tensor]
"""Token ids (…) → the target's embeddings (…, D)."""
KINDS = ("silu", "tanh", "linear", "vanilla", "gated", "rnn")
TABLES = ("vanilla", "gated", "rnn")
"""Kinds with a row for each of the target's tokens."""
_SILENT = {
    "silu": ("out",),
    "tanh": ("out",),
    "linear": ("previous",),
    "vanilla": ("table",),
    "gated": ("table",),
    "rnn": ("table", "hidden"),
}


class MarkovHead(nn.Module):
    """A head of one of `KINDS`, not yet initialised.

    table: T. hidden: W_h. previous: W_e or W_t. out: W_z. basis: (r, vocabulary). silent: the
    layers that start at zero, so that z does.
    """

    def __init__(
        self,
        kind: str,
        width: int,
        rank: int,
        vocabulary: int,
        target_vocabulary: int,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.kind, self.silent = kind, _SILENT[kind]
        self.table: nn.Embedding | None = None
        self.hidden: nn.Linear | None = None
        self.previous: nn.Linear | None = None
        self.out: nn.Linear | None = None
        self.basis = nn.Parameter(torch.zeros(rank, vocabulary))
        if kind in TABLES:
            self.table = nn.Embedding(target_vocabulary, rank)
        if kind not in ("linear", "vanilla"):
            self.hidden = nn.Linear(width, rank, bias=bias)
        if kind != "vanilla":
            self.previous = nn.Linear(rank if kind in TABLES else width, rank, bias=False)
        if kind in ("silu", "tanh"):
            self.out = nn.Linear(rank, rank, bias=False)

    def inputs(self, hidden: Tensor) -> Tensor:
        """What `mix` needs of hidden states, (…, D) → (…, any width)."""
        return hidden[..., :0] if self.hidden is None else self.hidden(hidden)

    def mix(self, inputs: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        """From `inputs` and the previous tokens (…) → (…, r), before `out`."""
        row = embed(previous).to(inputs.dtype) if self.table is None else self.table(previous)
        if self.previous is None:
            return row
        projected = self.previous(row)
        if self.kind == "linear":
            return projected
        mixed = inputs + projected
        if self.kind == "gated":
            return torch.sigmoid(mixed) * row
        return F.silu(mixed) if self.kind == "silu" else mixed.tanh()

    def finish(self, mixed: Tensor) -> Tensor:
        return mixed if self.out is None else self.out(mixed)

    def forward(self, hidden: Tensor, previous: Tensor, embed: Embed) -> Tensor:
        """Hidden states (…, D) and previous tokens (…) → z (…, r)."""
        return self.finish(self.mix(self.inputs(hidden), previous, embed))

    @torch.no_grad()
    def basis_Vr(self, folded: bool = False) -> Tensor:
        """The basis with a row for each token, (Vd, r); `folded`: with `out` multiplied in."""
        basis_Vr = self.basis.detach().t()
        if folded and self.out is not None:
            basis_Vr = basis_Vr @ self.out.weight.to(self.basis.dtype)
        return basis_Vr.contiguous()
