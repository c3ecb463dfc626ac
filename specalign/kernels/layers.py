"""`layers.c` from Python: the layers of a decoder over few rows in one call."""

from __future__ import annotations

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
        *(
            (name, c_int64)
            for name in (
                "layers",
                "width",
                "inner",
                "heads",
                "kv_heads",
                "head_width",
                "block",
                "groups",
            )
        ),
        *((name, c_float) for name in ("scale", "eps", "head_eps")),
        ("layer", POINTER(_Layer)),
        ("last_norm", c_void_p),
        ("state", MatrixFields),
        ("state_norm", c_void_p),
    ]


class _Request(Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("columns", c_void_p),
        ("stride", c_int64),
        ("columns_stride", c_int64),
        ("turned", c_int64),
        ("past", c_int64),
        ("rows", c_int64),
        ("see", c_void_p),
        ("apart", c_int64),
    ]


TILE = 16
"""Keys that stand side by side in `Memory.columns` (layers.c)."""

_LAYOUT = sizeof(_Stack) << 40 | sizeof(_Layer) << 20 | sizeof(_Request)


def pointer_of(
    tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, held: list[Any]
) -> int | None:
    """Where a tensor lies, which joins `held`, so that its memory stays whatever becomes of the
    parameter; None for None.

    Raises:
        ValueError: it is not contiguous, or of another shape or type.
    """
    if tensor is None:
        return None
    if not tensor.is_contiguous() or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{tuple(tensor.shape)} in {tensor.dtype}, where {shape} in {dtype} belongs"
        )
    held.append(tensor.detach())
    return tensor.data_ptr()


def matrix_fields(matrix: Matrix, shape: tuple[int, int], held: list[Any]) -> MatrixFields:
    """A matrix of this shape; `ValueError` as `pointer_of`, and for int8 without a scale or a scale
    without int8."""
    dtype = matrix.weight.dtype if matrix.weight.dtype in KINDS else torch.float32
    if (dtype == torch.int8) != (matrix.scale is not None):
        raise ValueError(
            f"a weight in {dtype} {'without' if matrix.scale is None else 'with'} a scale"
        )
    vectors = (pointer_of(vector, shape[:1], torch.float32, held) for vector in matrix[1:])
    return MatrixFields(pointer_of(matrix.weight, shape, dtype, held), *vectors, KINDS.index(dtype))


@dataclass
class Convolution:
    """Two taps around a sublayer (`TwoTapConvolution` of specalign.models.block_layers): `delta` (4 ·
    groups, width), `offset` (2, 2, width)."""

    delta: Matrix
    offset: Tensor


@dataclass
class Weights:
    """One layer's: matrices, norms (width,) or None, and convolutions, all contiguous."""

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
    """Where layers keep keys and values of one request: views (1, kv_heads, capacity, head_width),
    fp32, of one shape. The keys stand there once more as columns, `TILE` of them side by side, as
    the scores of few rows are fastest."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        keys, values = [t.detach() for t in keys], [t.detach() for t in values]
        first = keys[0]
        assert all(
            t.shape == first.shape and t.stride() == first.stride() for t in (*keys, *values)
        )
        assert (
            len(first) == 1
            and first.dtype == torch.float32
            and first.stride()[2:] == (first.shape[3], 1)
        )
        self.heads, self.capacity, self.width = first.shape[1:]
        self.keys = (c_void_p * len(keys))(*(t.data_ptr() for t in keys))
        self.values = (c_void_p * len(values))(*(t.data_ptr() for t in values))
        tiles = -(-self.capacity // TILE)
        self.columns = first.new_zeros(len(keys), self.heads, tiles, self.width, TILE)
        self.turned = 0
        """How many of the first keys stand in `columns`."""
        strides = first.stride(1), self.columns.stride(1)
        self.places = (
            addressof(self.keys),
            addressof(self.values),
            self.columns.data_ptr(),
            *strides,
        )
        """What a `_Request` begins with."""
        self._held = [*keys, *values]

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

    @property
    def end(self) -> int:
        """How many places of the memory are read or written."""
        return self.past if self.apart else self.past + self.rows


@dataclass
class LayerStack:
    """Layers of one shape, ready for `layers.c`. `last_norm`: what their output is normalised by,
    None = nothing.

    Args:
        heads, kv_heads, head_width: of the attention; head_width is a multiple of 8.
        scale: of the scores. eps: of the norms, `head_eps` of those of single heads.
        state: a norm (D,) and a matrix (D, D), for calls with a state: every row is given matrix ·
            norm(state) first.
        block: rows of a block, of which convolutions know the edges. The rows of a call are those
            of whole blocks.

    Raises:
        ValueError: layers of several shapes, or of one or a type that `layers.c` does not take.
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
        deltas = [
            c.delta.weight
            for w in self.weights
            for c in (w.attention_conv, w.mlp_conv)
            if c is not None
        ]
        self.groups = len(deltas[0]) // 4 if deltas else 0
        if self.groups and self.width % self.groups:
            raise ValueError(f"{self.groups} groups of {self.width} channels")
        self._layers = (_Layer * len(self.weights))(*map(self._layer, self.weights))
        self._stack = _Stack(
            len(self.weights), self.width, self.inner, self.heads, self.kv_heads, self.head_width,
            self.block, self.groups, self.scale, self.eps, self.head_eps, self._layers, self._vector(self.last_norm, self.width),
        )  # fmt: skip
        if self.state is not None:
            norm, matrix = self.state
            self._stack.state = matrix_fields(matrix, (self.width, self.width), self._held)
            self._stack.state_norm = self._vector(norm, self.width)
        self._library = rows_library()
        if self._library.layers_layout() != _LAYOUT:
            raise ValueError("the library was compiled from other files: make setup")

    def _layer(self, weights: Weights) -> _Layer:
        found, width, inner = _Layer(), self.width, self.inner
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        shapes = [
            (q, width),
            (kv, width),
            (kv, width),
            (width, q),
            *[(inner, width)] * 2,
            (width, inner),
        ]
        for name, shape in zip(_MATRICES, shapes, strict=True):
            setattr(found, name, matrix_fields(getattr(weights, name), shape, self._held))
        for name, size in zip(
            _NORMS, (width, width, self.head_width, self.head_width), strict=True
        ):
            setattr(found, name, self._vector(getattr(weights, name), size))
        for name in _CONVOLUTIONS:
            if (convolution := getattr(weights, name)) is not None:
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
        apart. fp32, R ≤ 32.

        Raises:
            ValueError: more rows than that, a memory without room or of another shape, inputs of
                another shape or type.
        """
        count = sum(r.rows for r in requests)
        if any(
            (r.memory.heads, r.memory.width) != (self.kv_heads, self.head_width) for r in requests
        ):
            raise ValueError(
                f"a memory of other heads than {self.kv_heads} of width {self.head_width}"
            )
        if any(
            r.see is not None
            and (r.see.dtype, tuple(r.see.shape)) != (torch.bool, (r.rows, r.rows))
            for r in requests
        ):
            raise ValueError("which rows see which is bool, (rows, rows)")
        sizes = [(x_RD, self.width), (cos_Rw, self.head_width), (sin_Rw, self.head_width)]
        if any(t.dtype != torch.float32 or tuple(t.shape) != (count, size) for t, size in sizes):
            raise ValueError(f"{len(x_RD)} rows in {x_RD.dtype} for requests of {count}, in fp32")
        if count > MOST_ROWS or any(r.end > r.memory.capacity for r in requests):
            raise ValueError(
                f"{count} rows: at most {MOST_ROWS} at a time, and no more than the memory has "
                "room for"
            )
        if state_D is not None:
            if self.state is None or (state_D.dtype, tuple(state_D.shape)) != (
                torch.float32,
                (self.width,),
            ):
                raise ValueError("a state (D,) in fp32, for a stack that knows what to do with one")
            state_D = state_D.contiguous()
        x_RD = x_RD.clone(memory_format=torch.contiguous_format)
        cos_Rw, sin_Rw = cos_Rw.contiguous(), sin_Rw.contiguous()
        given = (_Request * len(requests))()
        for i, rows in enumerate(requests):
            memory, see = rows.memory, None if rows.see is None else rows.see.data_ptr()
            given[i] = _Request(
                *memory.places, memory.turned, rows.past, rows.rows, see, rows.apart
            )
        library = self._library
        scratch = x_RD.new_empty(library.layers_scratch(byref(self._stack), given, len(given)))
        wanted, tapped, where = list(dict.fromkeys(taps)), None, None
        if wanted:
            tapped, where = (
                x_RD.new_empty(len(wanted), count, self.width),
                (c_void_p * len(self.weights))(),
            )
            for layer, place in zip(wanted, tapped, strict=True):
                where[layer] = place.data_ptr()
        library.layers_forward(
            byref(self._stack), x_RD.data_ptr(), None if state_D is None else state_D.data_ptr(), cos_Rw.data_ptr(), sin_Rw.data_ptr(), given, len(given), where, scratch.data_ptr(),
        )  # fmt: skip
        for rows in requests:
            rows.memory.turned = rows.past
        return x_RD, None if tapped is None else tapped[[wanted.index(layer) for layer in taps]]


class RepeatedCall:
    """Drafts of one request: calls of a stack for blocks that differ in their first row alone, a
    token's embedding, and stay apart from the memory that they follow. What does not change between
    calls is prepared once: after a forward pass of the target every operator of Python or torch finds the
    caches swept, so that each takes some 10 µs, and a small drafter's layers take 700.

    Args:
        stack: one that knows what to do with a state.
        memory: what the rows follow. see_RR: which rows each one sees, bool.
        block_RD: the rows, in fp32; the first is filled in. embedding_VD: every token's, in fp32 or
            bf16.

    Raises:
        ValueError: a memory of other heads, rows or embeddings of another shape or type.
    """

    def __init__(
        self,
        stack: LayerStack,
        memory: Memory,
        see_RR: Tensor,
        block_RD: Tensor,
        embedding_VD: Tensor,
    ) -> None:
        if (memory.heads, memory.width) != (
            stack.kv_heads,
            stack.head_width,
        ) or stack.state is None:
            raise ValueError(f"a memory of {memory.heads} heads of width {memory.width}")
        self.rows, self._tokens, self._held = len(see_RR), len(embedding_VD), list[Any]()
        self._block_RD = block_RD.detach().contiguous()
        pointer_of(self._block_RD, (self.rows, stack.width), torch.float32, self._held)
        self._embedding = matrix_fields(
            Matrix(embedding_VD), (self._tokens, stack.width), self._held
        )
        self.memory, self._stack, self._see_RR = memory, stack, see_RR.contiguous()
        self._request = _Request(
            *memory.places, 0, memory.capacity, self.rows, self._see_RR.data_ptr(), True
        )
        longest = stack._library.layers_scratch(byref(stack._stack), byref(self._request), 1)
        self._scratch = torch.empty(longest, dtype=torch.float32)
        self._tables_2Sw: Tensor | None = None

    def __call__(self, token: int, state_1D: Tensor, tables_2Sw: Tensor, past: int) -> Tensor:
        """Last hidden states (R, D) of the block that begins with `token`, at the positions from
        `past` on. `state_1D`: the target's before it. `tables_2Sw`: the rotary tables of at least
        this many positions. Everything in fp32 and contiguous.

        Raises:
            ValueError: inputs of another shape, type or layout, a token outside the embeddings, or
                a longer past than the memory has.
        """
        stack = self._stack
        if tables_2Sw is not self._tables_2Sw:
            self._check(tables_2Sw, (2, len(tables_2Sw[0]), stack.head_width))
            self._tables_2Sw, self._cosine = tables_2Sw, tables_2Sw.data_ptr()
            self._positions = tables_2Sw.shape[1]
        self._check(state_1D, (1, stack.width))
        if not 0 <= past <= self.memory.capacity or past + self.rows > self._positions:
            raise ValueError(f"{past} positions before the rows")
        if not 0 <= token < self._tokens:
            raise ValueError(f"the token {token}, of {self._tokens}")
        x_RD = self._block_RD.clone()
        x = x_RD.data_ptr()
        stack._library.matrix_row(byref(self._embedding), token, stack.width, x)
        self._request.past, self._request.turned = past, self.memory.turned
        cosine = self._cosine + past * stack.head_width * 4
        sine = cosine + self._positions * stack.head_width * 4
        stack._library.layers_forward(
            byref(stack._stack), x, state_1D.data_ptr(), cosine, sine, byref(self._request), 1, None, self._scratch.data_ptr(),
        )  # fmt: skip
        self.memory.turned = past
        return x_RD

    @staticmethod
    def _check(tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{tuple(tensor.shape)} in {tensor.dtype}, where {shape} in fp32, contiguous, "
                "belongs"
            )
