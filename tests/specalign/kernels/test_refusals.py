"""What the C kernels are not given: shapes, types and places that they would read beyond."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specalign.kernels.choice import verified_chain
from specalign.kernels.layers import LayerStack, Memory, Rows, Weights
from specalign.kernels.linear import MOST_ROWS, Matrix, rows_library
from specalign.kernels.tree import DraftHead, MarkovWeights

pytestmark = pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")

WIDTH, CAPACITY = 16, 40


def matrix(out: int, into: int) -> Matrix:
    return Matrix(torch.ones(out, into) / into)


def make_stack(
    heads: int = 2, kv_heads: int = 1, head_width: int = 8, **changed: Any
) -> LayerStack:
    q, kv = heads * head_width, kv_heads * head_width
    sizes = [(q, WIDTH), (kv, WIDTH), (kv, WIDTH), (WIDTH, q)]
    sizes += [(24, WIDTH), (24, WIDTH), (WIDTH, 24)]
    weights = Weights(*(matrix(*size) for size in sizes), torch.ones(WIDTH), torch.ones(WIDTH))
    return LayerStack([replace(weights, **changed)], heads, kv_heads, head_width, 1.0, 1e-5)


def run(stack: LayerStack, past: int, rows: int, **options: Any) -> Tensor:
    size = (1, options.pop("kv_heads", 1), CAPACITY, options.pop("head_width", 8))
    memory = Memory([torch.zeros(size)], [torch.zeros(size)])
    x_RD = torch.ones(WIDTH, rows, dtype=options.pop("dtype", torch.float32)).t()
    tables = torch.ones(2, rows, options.pop("table", 8))
    return stack(x_RD, *tables, [Rows(memory, past, rows, **options)])[0]


def test_layers() -> None:
    stack = make_stack()
    for past, rows, options in ((0, MOST_ROWS, {}), (36, 4, {}), (CAPACITY, 4, {"apart": True})):
        assert run(stack, past, rows, **options).isfinite().all()
    for past, rows, options, line in (
        (0, MOST_ROWS + 1, {}, "33 rows: at most 32"),
        (37, 4, {}, "41 positions in a memory with room for 40"),
        (CAPACITY + 1, 4, {"apart": True}, "41 positions"),
        (0, 4, {"kv_heads": 2}, "a memory of 2 heads of width 8"),
        (0, 4, {"head_width": 16}, "a memory of 1 heads of width 16"),
        (0, 4, {"see": torch.ones(4, 3, dtype=torch.bool)}, "belongs"),
        (0, 4, {"see": torch.ones(4, 4)}, "belongs"),
        (0, 4, {"dtype": torch.float64}, "belongs"),
        (0, 4, {"table": 4}, "belongs"),
    ):
        with pytest.raises(ValueError, match=line):
            run(stack, past, rows, **options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"heads": 3, "kv_heads": 2}, "3 heads over 2 of width 8"),
        ({"head_width": 12}, "2 heads over 1 of width 12"),
        ({"down": matrix(WIDTH, 23)}, "belongs"),
        ({"up": Matrix(torch.ones(24, WIDTH, dtype=torch.float64))}, "belongs"),
        ({"before_mlp": torch.ones(WIDTH + 1)}, "belongs"),
        ({"q_norm": torch.ones(WIDTH)}, "belongs"),
        ({"up": Matrix(torch.ones(24, WIDTH, dtype=torch.int8))}, "int8 goes with a scale"),
        ({"up": matrix(24, WIDTH)._replace(scale=torch.ones(24))}, "float32 does not"),
        ({"up": matrix(24, WIDTH)._replace(bias=torch.ones(23))}, "belongs"),
    ],
)
def test_weights(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make_stack(**options)


def test_chains() -> None:
    p_MV, tokens_K, u_2 = torch.ones(3, 4) / 4, torch.tensor([1, 2]), torch.rand(2).double()
    assert 0 <= verified_chain(p_MV, p_MV[:2], None, tokens_K, u_2).accepted <= 2
    some = torch.arange(3)
    for p, q, ids, tokens in (
        (p_MV[:2], p_MV[:2], None, tokens_K),
        (p_MV, p_MV[:2], None, tokens_K[:1]),
        (p_MV[:1], p_MV[:0], None, tokens_K[:0]),
        (p_MV, p_MV[:2], some, tokens_K),
        (p_MV, p_MV[:2, :3].contiguous(), None, tokens_K),
    ):
        with pytest.raises(ValueError, match="drafts with rows"):
            verified_chain(p, q, ids, tokens, u_2)
    with pytest.raises(ValueError, match=r"outside the vocabulary, 0\.\.3"):
        verified_chain(p_MV, p_MV[:2], None, torch.tensor([1, 4]), u_2)


def test_trees() -> None:
    head, ids = matrix(6, WIDTH), torch.arange(6)
    markov = MarkovWeights(matrix(4, WIDTH), matrix(4, WIDTH), matrix(6, 4), torch.ones(9, WIDTH))
    hidden_KD, drafts = torch.ones(3, WIDTH), DraftHead(head, ids, markov)
    for levels in (1, 3, MOST_ROWS):
        assert len(drafts(torch.ones(levels, WIDTH), 8, 5, 1.0)[0]) == 5
    assert len(DraftHead(head, ids, None)(hidden_KD, 99, 5, 1.0)[0]) == 5
    for rows, last, nodes in ((0, 1, 5), (MOST_ROWS + 1, 1, 5), (3, 9, 5), (3, -1, 5), (3, 1, 0)):
        with pytest.raises(ValueError, match=f"{rows} levels of {nodes} nodes"):
            drafts(torch.ones(rows, WIDTH), last, nodes, 1.0)
    with pytest.raises(ValueError, match="silu without a matrix"):
        DraftHead(head, ids, markov._replace(hidden=None))
    for wrong in (ids + 4, ids - 1):
        with pytest.raises(ValueError, match=r"tokens outside 0\.\.8"):
            DraftHead(head, wrong, markov)
    for bad_head, bad_ids in ((head, ids[:5]), (matrix(5, WIDTH), ids)):
        with pytest.raises(ValueError, match="belongs"):
            DraftHead(bad_head, bad_ids, markov)
