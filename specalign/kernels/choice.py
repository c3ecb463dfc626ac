"""`choice.c` from Python: choices out of rows over a vocabulary, in one call each."""

from ctypes import Structure, byref, c_double, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from specalign.kernels.linear import rows_library


class _Chain(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("p", "q", "ids", "tokens")),
        *((name, c_int64) for name in ("drafts", "vocabulary", "columns")),
    ]


class ChainEnd(NamedTuple):
    """Where the accepted part of a chain of K drafts ends: `stop`, the K + 1 probabilities that so
    many are accepted; how many are; the token after them."""

    stop: list[float]
    accepted: int
    following: int


def takes(*tensors: Tensor) -> bool:
    """Whether they are for `choice.c`: on a CPU with the library, in fp32, contiguous."""
    return rows_library() is not None and all(
        t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors
    )


def largest(rows_RV: Tensor) -> Tensor:
    """The first column with the largest number of each row, (R,); NaN counts as the largest."""
    count, size = rows_RV.shape
    at_R = torch.empty(count, dtype=torch.int64)
    rows_library().largest_of_rows(rows_RV.data_ptr(), count, size, at_R.data_ptr())
    return at_R


def verified_chain(
    p_MV: Tensor, q_KS: Tensor, ids_S: Tensor | None, tokens_K: Tensor, u_2: Tensor
) -> ChainEnd:
    """Block verification of a chain of K = M − 1 ≥ 1 drafts (Sun et al., arXiv 2403.10444), as the
    rule `block` computes it. Raises ValueError: shapes that do not fit, an unknown token.

    Args:
        p_MV: the target's probabilities after 0, 1, … drafts. q_KS: what each draft was drawn from.
        ids_S: the columns' tokens, int64, distinct; None = all V in their order.
        u_2: numbers in [0, 1), fp64: for the end, and for the token after it.
    """
    (count, columns), size = q_KS.shape, p_MV.shape[1]
    tokens_K, u_2 = tokens_K.contiguous(), u_2.contiguous()
    ids = None
    fits = columns == size
    if ids_S is not None:
        ids_S = ids_S.contiguous()
        ids, fits = ids_S.data_ptr(), len(ids_S) == columns
    if not (len(p_MV) - 1 == len(tokens_K) == count > 0) or not fits:
        shapes = f"{tuple(q_KS.shape)} of q and {tuple(p_MV.shape)} of p"
        raise ValueError(f"{len(tokens_K)} drafts with rows {shapes}")
    chain = _Chain(p_MV.data_ptr(), q_KS.data_ptr(), ids, tokens_K.data_ptr(), count, size, columns)
    stop, chosen = (c_double * (count + 1))(), (c_int64 * 2)()
    room = torch.empty(count * size, dtype=torch.float32)
    if not rows_library().verify_chain(byref(chain), u_2.data_ptr(), stop, chosen, room.data_ptr()):
        raise ValueError(f"a token outside the vocabulary, 0..{size - 1}")
    return ChainEnd(list(stop), *chosen)
