"""Drafts of one request by `layers.c`, prepared once."""

from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from specalign.kernels.layers import LayerStack, Memory, Rows, check_tensor, matrix_fields
from specalign.kernels.linear import Matrix


class RepeatedCall:
    """Drafts of one request: calls of a stack for blocks that differ in their first row alone, a
    token's embedding, and stay apart from the memory that they follow. What does not change between
    calls is prepared once: after a forward pass of the target each operator of Python or torch
    takes some 10 µs, and a small drafter's layers 700.

    Args:
        stack: one that knows what to do with a state.
        memory: what the rows follow. see_RR: which rows each one sees, bool.
        block_RD: the rows; the first is filled in. embedding_VD: every token's, in fp32 or bf16.
    """

    def __init__(
        self,
        stack: LayerStack,
        memory: Memory,
        see_RR: Tensor,
        block_RD: Tensor,
        embedding_VD: Tensor,
    ) -> None:
        assert stack.state is not None
        self.memory, self.rows, self._stack = memory, len(see_RR), stack
        self._tokens, held = len(embedding_VD), list[Any]()
        block_RD = block_RD.detach().contiguous()
        self._block_RD = check_tensor(block_RD, (self.rows, stack.width))
        table = Matrix(embedding_VD)
        self._embedding = matrix_fields(table, (self._tokens, stack.width), held)
        rows = Rows(memory, memory.capacity, self.rows, see_RR.contiguous(), apart=True)
        self._request, self._held = stack.describe(rows), (held, rows)
        longest = stack.library.layers_scratch(byref(stack.fields), byref(self._request), 1)
        self._scratch = torch.empty(longest, dtype=torch.float32)
        self._tables_2Sw: Tensor | None = None

    def __call__(self, token: int, state_1D: Tensor, tables_2Sw: Tensor, past: int) -> Tensor:
        """Last hidden states (R, D) of the block that begins with `token`, at the positions from
        `past` on. `state_1D`: the target's before it. `tables_2Sw`: the rotary tables of at least
        this many positions, all fp32 and contiguous. Raises ValueError for what does not fit."""
        stack = self._stack
        if tables_2Sw is not self._tables_2Sw:
            check_tensor(tables_2Sw, (2, len(tables_2Sw[0]), stack.head_width))
            self._tables_2Sw, self._cosine = tables_2Sw, tables_2Sw.data_ptr()
            self._positions = tables_2Sw.shape[1]
        check_tensor(state_1D, (1, stack.width))
        if not 0 <= past <= self.memory.capacity or past + self.rows > self._positions:
            raise ValueError(f"{past} positions before the rows")
        if not 0 <= token < self._tokens:
            raise ValueError(f"the token {token}, of {self._tokens}")
        x_RD = self._block_RD.clone()
        x = x_RD.data_ptr()
        stack.library.matrix_row(byref(self._embedding), token, stack.width, x)
        self._request.past, self._request.turned = past, self.memory.turned
        cosine = self._cosine + past * stack.head_width * 4
        sine = cosine + self._positions * stack.head_width * 4
        given, room = byref(self._request), self._scratch.data_ptr()
        stack.library.layers_forward(
            byref(stack.fields), x, state_1D.data_ptr(), cosine, sine, given, 1, None, room
        )
        self.memory.turned = past
        return x_RD
