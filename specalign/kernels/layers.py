"""`layers.c` from Python: the layers of a decoder over few rows in one call."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int64, c_void_p, sizeof
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specalign.kernels.linear import KINDS, MOST_ROWS, Matrix, MatrixFields, rows_library

_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_NORMS = ("before_attention", "before_mlp", "q_norm", "k_norm")
_CONVOLUTIONS = ("attention_conv", "mlp_conv")
_SIZES = ("layers", "width", "inner", "heads", "kv_heads", "head_width", "block", "groups")


class _Convolution(Structure):
    _fields_ = [("delta", MatrixFields), ("offset", c_void_p)]


class _Layer(Structure):
    _fields_ = [
        *((name, MatrixFields) for name in _MATRICES),
        *((name, c_void_p) for name in _NORMS),
        *((name, _Convolution) for name in _CONVOLUTIONS),
    ]


class _Stack(Structure):
    _fields_ = [
        *((name, c_int64) for name in _SIZES),
        *((name, c_float) for name in ("scale", "eps", "head_eps")),
        ("layer", POINTER(_Layer)),
        ("last_norm", c_void_p),
        ("state", MatrixFields),
        ("state_norm", c_void_p),
    ]


class _Request(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "columns")),
        *((name, c_int64) for name in ("stride", "columns_stride", "turned", "past", "rows")),
        ("see", c_void_p),
        ("apart", c_int64),
    ]


TILE = 16
"""Keys that stand side by side in `Memory.columns` (layers.c)."""

_LAYOUT = sizeof(_Stack) << 40 | sizeof(_Layer) << 20 | sizeof(_Request)


def check_tensor(
    tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """The same tensor, contiguous, of this shape and type; else ValueError."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        given = f"{tuple(tensor.shape)} in {tensor.dtype}"
        raise ValueError(f"{given}, where {shape} in {dtype}, contiguous, belongs")
    return tensor


def pointer_of(
    tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, held: list[Any]
) -> int | None:
    """The address of a checked tensor, which is kept in `held`; None for None."""
    if tensor is None:
        return None
    held.append(check_tensor(tensor, shape, dtype).detach())
    return tensor.data_ptr()


def matrix_fields(matrix: Matrix, shape: tuple[int, int], held: list[Any]) -> MatrixFields:
    """A checked matrix of this shape. Raises ValueError also for int8 without a scale."""
    dtype = matrix.weight.dtype if matrix.weight.dtype in KINDS else torch.float32
    if (dtype == torch.int8) != (matrix.scale is not None):
        raise ValueError(f"int8 goes with a scale, {dtype} does not")
    vectors = (pointer_of(vector, shape[:1], torch.float32, held) for vector in matrix[1:])
    return MatrixFields(pointer_of(matrix.weight, shape, dtype, held), *vectors, KINDS.index(dtype))


@dataclass
class Convolution:
    """`TwoTapConvolution`: `delta` (4 · groups, width), `offset` (2, 2, width)."""

    delta: Matrix
    offset: Tensor


@dataclass
class Weights:
    """One layer's weights: matrices, norms (width,) or None, and convolutions, all contiguous."""

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    before_attention: Tensor
    before_mlp: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None


class Memory:
    """Keys and values of one request in each layer: views (1, kv_heads, capacity, head_width) of
    one shape, fp32. The first `turned` keys stand once more in `columns`, `TILE` side by side,
    which is fastest for few rows."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._held = [t.detach() for t in (*keys, *values)]
        first = keys[0]
        assert all((t.shape, t.stride()) == (first.shape, first.stride()) for t in self._held)
        assert len(first) == 1 and first.dtype == torch.float32
        assert first.stride()[2:] == (first.shape[3], 1)
        self.heads, self.capacity, self.width = first.shape[1:]
        self.keys = (c_void_p * len(keys))(*(t.data_ptr() for t in keys))
        self.values = (c_void_p * len(values))(*(t.data_ptr() for t in values))
        tiles = -(-self.capacity // TILE)
        columns = first.detach().new_zeros(len(keys), self.heads, tiles, self.width, TILE)
        self.columns, self.turned = columns, 0
        tables = addressof(self.keys), addressof(self.values)
        self.places = (*tables, columns.data_ptr(), first.stride(1), columns.stride(1))
        """What a `_Request` begins with."""

    def roll_back(self, length: int) -> None:
        """Keys from `length` on may have changed."""
        self.turned = min(self.turned, length)


@dataclass
class Rows:
    """Rows of one request that follow the `past` positions of its memory. see: which of them each
    one sees, bool (rows, rows), contiguous; None = those up to itself. apart: whether their own
    keys and values are not written into the memory."""

    memory: Memory
    past: int
    rows: int
    see: Tensor | None = None
    apart: bool = False


@dataclass
class LayerStack:
    """Layers of one shape, ready for `layers.c`. `last_norm`: what their output is normalised by,
    None = nothing.

    Args:
        heads, kv_heads, head_width: of the attention; head_width is a multiple of 8.
        scale: of the scores. eps: of the norms, `head_eps` of those of single heads.
        state: a norm (D,) and a matrix (D, D): calls with a state add matrix · norm(state) to rows.
        block: rows of a block, of which convolutions know the edges; a call takes whole blocks.

    Raises ValueError: layers of several shapes, or of one or a type that `layers.c` does not take.
    """

    weights: Sequence[Weights]
    heads: int
    kv_heads: int
    head_width: int
    scale: float
    eps: float
    last_norm: Tensor | None = None
    head_eps: float = 0.0
    state: tuple[Tensor, Matrix] | None = None
    block: int = 1
    _held: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_width % 8:
            raise ValueError(f"{self.heads} heads over {self.kv_heads} of width {self.head_width}")
        self.inner, self.width = self.weights[0].gate[0].shape
        convolutions = [c for w in self.weights for c in (w.attention_conv, w.mlp_conv) if c]
        self.groups = len(convolutions[0].delta.weight) // 4 if convolutions else 0
        if self.groups and self.width % self.groups:
            raise ValueError(f"{self.groups} groups of {self.width} channels")
        self._layers = (_Layer * len(self.weights))(*map(self._layer, self.weights))
        heads = (self.heads, self.kv_heads, self.head_width)
        sizes = (len(self.weights), self.width, self.inner, *heads, self.block, self.groups)
        numbers = (self.scale, self.eps, self.head_eps)
        last = self._vector(self.last_norm, self.width)
        self.fields = _Stack(*sizes, *numbers, self._layers, last)
        if self.state is not None:
            norm, matrix = self.state
            self.fields.state = matrix_fields(matrix, (self.width, self.width), self._held)
            self.fields.state_norm = self._vector(norm, self.width)
        self.library = rows_library()
        if self.library.layers_layout() != _LAYOUT:
            raise ValueError("the library was compiled from different sources: run make setup")

    def _layer(self, weights: Weights) -> _Layer:
        found, width, inner, head = _Layer(), self.width, self.inner, self.head_width
        q, kv = self.heads * head, self.kv_heads * head
        attention = ((q, width), (kv, width), (kv, width), (width, q))
        shapes = (*attention, (inner, width), (inner, width), (width, inner))
        for name, shape in zip(_MATRICES, shapes, strict=True):
            setattr(found, name, matrix_fields(getattr(weights, name), shape, self._held))
        for name, size in zip(_NORMS, (width, width, head, head), strict=True):
            setattr(found, name, self._vector(getattr(weights, name), size))
        for name in _CONVOLUTIONS:
            convolution: Convolution | None = getattr(weights, name)
            if convolution is not None:
                delta = matrix_fields(convolution.delta, (4 * self.groups, width), self._held)
                offset = pointer_of(convolution.offset, (2, 2, width), torch.float32, self._held)
                setattr(found, name, _Convolution(delta, offset))
        return found

    def _vector(self, tensor: Tensor | None, size: int) -> int | None:
        return pointer_of(tensor, (size,), torch.float32, self._held)

    def __call__(
        self,
        x_RD: Tensor,
        cos_Rw: Tensor,
        sin_Rw: Tensor,
        requests: Sequence[Rows],
        taps: Sequence[int] = (),
        state_D: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Last hidden states (R, D) of the requests' rows, one after the other, and the outputs (F,
        R, D) of the layers `taps`. Writes their keys and values into the memories, unless they stay
        apart. fp32, R ≤ 32. Raises ValueError for more rows than that, a memory without room or of
        another shape, inputs of another shape or type."""
        count, library = sum(r.rows for r in requests), self.library
        if count > MOST_ROWS:
            raise ValueError(f"{count} rows: at most {MOST_ROWS} at a time")
        x_RD = check_tensor(x_RD.clone(memory_format=torch.contiguous_format), (count, self.width))
        cos_Rw = check_tensor(cos_Rw.contiguous(), (count, self.head_width))
        sin_Rw = check_tensor(sin_Rw.contiguous(), (count, self.head_width))
        state = None
        if state_D is not None:
            assert self.state is not None
            state_D = check_tensor(state_D.contiguous(), (self.width,))
            state = state_D.data_ptr()
        given = (_Request * len(requests))(*map(self.describe, requests))
        scratch = x_RD.new_empty(library.layers_scratch(byref(self.fields), given, len(given)))
        wanted, tapped, where = list(dict.fromkeys(taps)), None, None
        if wanted:
            tapped = x_RD.new_empty(len(wanted), count, self.width)
            where = (c_void_p * len(self.weights))()
            for layer, place in zip(wanted, tapped, strict=True):
                where[layer] = place.data_ptr()
        tables = cos_Rw.data_ptr(), sin_Rw.data_ptr()
        room = scratch.data_ptr()
        library.layers_forward(
            byref(self.fields), x_RD.data_ptr(), state, *tables, given, len(given), where, room
        )
        for rows in requests:
            rows.memory.turned = rows.past
        return x_RD, None if tapped is None else tapped[[wanted.index(layer) for layer in taps]]

    def describe(self, rows: Rows) -> _Request:
        """Rows as the library reads them. Raises ValueError for a memory that does not fit."""
        memory, see = rows.memory, None
        end = rows.past if rows.apart else rows.past + rows.rows
        if (memory.heads, memory.width) != (self.kv_heads, self.head_width):
            raise ValueError(f"a memory of {memory.heads} heads of width {memory.width}")
        if end > memory.capacity:
            raise ValueError(f"{end} positions in a memory with room for {memory.capacity}")
        if rows.see is not None:
            see = check_tensor(rows.see, (rows.rows, rows.rows), torch.bool).data_ptr()
        return _Request(*memory.places, memory.turned, rows.past, rows.rows, see, rows.apart)
