"""`tree.c` from Python: a block drafter's tree of drafts, or a chain, in one call."""

from ctypes import Structure, byref, c_double, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specalign.kernels.layers import check_tensor, matrix_fields, pointer_of
from specalign.kernels.linear import MOST_ROWS, Matrix, MatrixFields, rows_library


class _Head(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("width", "columns", "rank")),
        *((name, MatrixFields) for name in ("head", "hidden", "previous", "basis")),
        ("embedding", MatrixFields),
        ("ids", c_void_p),
        ("kind", c_int64),
    ]


KINDS = ("silu", "tanh", "linear")
"""Of Markov heads that `tree.c` knows, by their number there."""


class MarkovWeights(NamedTuple):
    """The bias basis·φ(hidden·h + previous·e(x)) on the logits after a token x, φ the `kind`, silu
    or tanh; `linear`: the bias basis·previous·e(x), without `hidden`. Matrices (r, D), (r, D) and
    (Vd, r), the embedding (V, D) in fp32 or bf16."""

    hidden: Matrix | None
    previous: Matrix
    basis: Matrix
    embedding_VD: Tensor
    kind: str = "silu"


class DraftHead:
    """A block drafter's head, ready for `tree.c`.

    head: (Vd, D). ids_Vd: the tokens of its lines, None = all of the vocabulary. markov: None = the
    logits do not depend on the token before. Raises ValueError: weights of other shapes or types.
    """

    def __init__(self, head: Matrix, ids_Vd: Tensor | None, markov: MarkovWeights | None) -> None:
        held = self._held = list[Any]()
        columns, width = self.columns, self.width = head.weight.shape
        self.library, self.tokens = rows_library(), None
        rank = 0 if markov is None else len(markov.previous.weight)
        fields = self.fields = _Head(width, columns, rank)
        fields.head = matrix_fields(head, (columns, width), held)
        if markov is not None:
            fields.kind = KINDS.index(markov.kind)
            if markov.kind != "linear":
                if markov.hidden is None:
                    raise ValueError(f"{markov.kind} without a matrix for hidden states")
                fields.hidden = matrix_fields(markov.hidden, (rank, width), held)
            fields.previous = matrix_fields(markov.previous, (rank, width), held)
            fields.basis = matrix_fields(markov.basis, (columns, rank), held)
            tokens = self.tokens = len(markov.embedding_VD)
            fields.embedding = matrix_fields(Matrix(markov.embedding_VD), (tokens, width), held)
            if ids_Vd is not None and not 0 <= int(ids_Vd.min()) <= int(ids_Vd.max()) < tokens:
                raise ValueError(f"tokens outside 0..{tokens - 1}")
        fields.ids = pointer_of(ids_Vd, (columns,), torch.int64, held)

    @staticmethod
    def takes(levels: int) -> bool:
        """Whether it builds trees of this many levels."""
        return 0 < levels <= MOST_ROWS

    def __call__(
        self, hidden_KD: Tensor, last: int, nodes: int, scale: float
    ) -> tuple[list[int], list[int], list[float]]:
        """The tree of the most probable paths of at most K tokens after the token `last`, by
        softmax(logits / scale): tokens, parents' places (−1 = the root) and ln q of each path, the
        most probable first; at most `nodes` of them. Raises ValueError: no hidden states (K, D) in
        fp32, K ≤ 32, or a token outside the vocabulary."""
        hidden_KD, scratch = self._check(hidden_KD, last, nodes)
        tokens, parents, log_q = (c_int64 * nodes)(), (c_int64 * nodes)(), (c_double * nodes)()
        given = byref(self.fields), hidden_KD.data_ptr(), len(hidden_KD), last
        found, room = (tokens, parents, log_q), scratch.data_ptr()
        count = self.library.draft_tree(*given, nodes, scale, *found, room)
        return tokens[:count], parents[:count], log_q[:count]

    def chain(
        self, hidden_KD: Tensor, last: int, scale: float, u_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A chain after the token `last`: columns (K,), each drawn with its number of `u_K`, fp64
        in [0, 1), and q (K, Vd), what they were drawn from: softmax(logits / scale) given those
        before. Raises ValueError as `__call__` does."""
        hidden_KD, scratch = self._check(hidden_KD, last, 1)
        levels = len(hidden_KD)
        u_K = check_tensor(u_K.contiguous(), (levels,), torch.float64)
        columns_K = torch.empty(levels, dtype=torch.int64)
        q_KV = torch.empty(levels, self.columns, dtype=torch.float32)
        given = byref(self.fields), hidden_KD.data_ptr(), levels, last, scale, u_K.data_ptr()
        self.library.draw_chain(*given, columns_K.data_ptr(), q_KV.data_ptr(), scratch.data_ptr())
        return columns_K, q_KV

    def _check(self, hidden_KD: Tensor, last: int, nodes: int) -> tuple[Tensor, Tensor]:
        """The hidden states, contiguous, and room to work in."""
        levels = len(hidden_KD)
        hidden_KD = check_tensor(hidden_KD.contiguous(), (levels, self.width))
        if not self.takes(levels) or nodes < 1 or (self.tokens and not 0 <= last < self.tokens):
            raise ValueError(f"{levels} levels of {nodes} nodes after the token {last}")
        size = self.library.tree_scratch(byref(self.fields), levels, nodes)  # by the threads of now
        return hidden_KD, torch.empty(size, dtype=torch.uint8)
