"""Drafts in one call: the same tree, and the same q of a drawn chain, as by torch in float64, for heads of all kinds and sizes."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from decode.speculation.sampling import draw_at
from specalign.kernels.linear import KINDS, Matrix, round_weight, rows_library
from specalign.kernels.tree import DraftHead, MarkovWeights

pytestmark = pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")


def weights(
    columns: int, width: int, rank: int, tokens: int, dtype: torch.dtype, kind: str = "silu"
) -> tuple[Matrix, Tensor, MarkovWeights | None]:
    torch.manual_seed(columns + rank)
    head = round_weight(2 * torch.randn(columns, width) / width**0.5, dtype)
    ids = torch.randperm(tokens)[:columns].sort().values
    if not rank:
        return head, ids, None
    hidden, previous = (
        round_weight(torch.randn(rank, width) / width**0.5, dtype) for _ in range(2)
    )
    basis = round_weight(2 * torch.randn(columns, rank) / rank**0.5, dtype)
    embedding = 3 * torch.randn(tokens, width)
    first = None if kind == "linear" else hidden
    return head, ids, MarkovWeights(first, previous, basis, embedding, kind)


def logits_of(h: Tensor, token: int, head: Matrix, m: MarkovWeights | None) -> Tensor:
    """One node's logits in float64."""
    logits = head.dense(torch.float64) @ h
    if m is None:
        return logits
    mixed = m.previous.dense(torch.float64) @ m.embedding_VD[token].double()
    if m.hidden is not None:
        mixed = mixed + m.hidden.dense(torch.float64) @ h
        mixed = mixed.tanh() if m.kind == "tanh" else F.silu(mixed)
    return logits + m.basis.dense(torch.float64) @ mixed


def plainly(
    hidden_KD: Tensor, last: int, nodes: int, scale: float, head: Matrix, ids: Tensor, m: MarkovWeights | None
) -> tuple[list[int], list[int], list[float]]:  # fmt: skip
    """The same in float64: every path of every length, the most probable first, one node at a time."""
    tokens, parents, paths, levels = [last], [-1], [0.0], [0]
    open_: list[tuple[float, int, int]] = []  # −ln q, a parent's place, a token

    def extend(place: int) -> None:
        k = levels[place]
        if k == len(hidden_KD):
            return
        logits = logits_of(hidden_KD[k].double(), tokens[place], head, m)
        for column, value in enumerate((logits / scale).log_softmax(-1).tolist()):
            open_.append((-paths[place] - value, place, int(ids[column])))

    extend(0)
    for _ in range(nodes):
        if not open_:
            break
        best = min(open_)
        open_.remove(best)
        tokens.append(best[2])
        parents.append(best[1])
        paths.append(-best[0])
        levels.append(levels[best[1]] + 1)
        extend(len(tokens) - 1)
    return tokens[1:], [p - 1 for p in parents[1:]], paths[1:]


@pytest.mark.parametrize(
    ("columns", "width", "rank", "dtype", "levels", "nodes", "scale", "kind"),
    [
        (1100, 24, 10, torch.bfloat16, 4, 5, 1.0, "silu"),
        (1100, 24, 10, torch.float32, 3, 17, 0.6, "silu"),
        (515, 20, 7, torch.int8, 2, 40, 1.7, "tanh"),
        (515, 20, 7, torch.int8, 3, 9, 1.0, "linear"),
        (513, 9, 0, torch.int8, 4, 12, 1.0, "silu"),
        (3, 16, 5, torch.float32, 4, 33, 0.3, "tanh"),
        (1, 8, 1, torch.bfloat16, 5, 6, 1.0, "silu"),
    ],
)
def test_the_tree_is_that_of_float64(
    columns: int, width: int, rank: int, dtype: torch.dtype, levels: int, nodes: int, scale: float, kind: str,
    round_rows: Callable[[bool], None],
) -> None:  # fmt: skip
    round_rows(False)
    head, ids, markov = weights(columns, width, rank, 2 * columns, dtype, kind)
    hidden = torch.randn(levels, width)
    wanted = plainly(hidden, 1, nodes, scale, head, ids, markov)
    got = DraftHead(head, ids, markov)(hidden, 1, nodes, scale)
    assert got[:2] == wanted[:2]
    assert got[2] == pytest.approx(wanted[2], abs=1e-4)


@pytest.mark.parametrize("kind", ["silu", "linear"])
def test_an_embedding_in_bf16_gives_the_same_bits(kind: str) -> None:
    head, ids, markov = weights(700, 33, 12, 900, torch.float32, kind)
    assert markov is not None
    hidden, u_K = torch.randn(4, 33), torch.rand(4, dtype=torch.float64)
    kept = markov._replace(embedding_VD=markov.embedding_VD.bfloat16())
    half = DraftHead(head, ids, kept)
    whole = DraftHead(head, ids, kept._replace(embedding_VD=kept.embedding_VD.float()))
    for last in (0, 5, 899):
        assert half(hidden, last, 20, 1.0) == whole(hidden, last, 20, 1.0)
        one, two = (tree.chain(hidden, last, 1.0, u_K) for tree in (half, whole))
        assert all(map(torch.equal, one, two))


def test_one_thread_or_two_build_the_same_tree() -> None:
    head, ids, markov = weights(2100, 32, 12, 3000, torch.int8)
    hidden, tree = torch.randn(4, 32), DraftHead(head, ids, markov)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(tree(hidden, 5, 9, 1.0))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


def test_equal_logits_are_taken_from_the_lowest_column_on() -> None:
    head = Matrix(torch.zeros(1030, 8))
    tokens, parents, log_q = DraftHead(head, None, None)(torch.randn(2, 8), 0, 4, 1.0)
    assert (tokens, parents) == ([0, 1, 2, 3], [-1] * 4)
    assert log_q == pytest.approx([-math.log(1030)] * 4)


def test_numbers_that_are_none_do_no_harm() -> None:
    head, ids, markov = weights(600, 16, 4, 900, torch.float32)
    tree = DraftHead(head, ids, markov)
    for wrong in (math.nan, math.inf, -math.inf):
        hidden = torch.randn(3, 16)
        hidden[1, 3] = wrong
        tokens, parents, _ = tree(hidden, 2, 6, 1.0)
        assert all(parent < place for place, parent in enumerate(parents))
        assert set(tokens) <= set(ids.tolist())


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("kind", ["silu", "tanh", "linear", ""])
@pytest.mark.parametrize("columns", [5, 700, 1024])
def test_a_drawn_chain(
    columns: int, kind: str, dtype: torch.dtype, round_rows: Callable[[bool], None]
) -> None:
    """Each row of q is the softmax given the tokens drawn before, and each token stands where its number falls in that row."""
    round_rows(False)
    head, ids, m = weights(columns, 24, 8 if kind else 0, 2 * columns, dtype, kind)
    drafts, drawn = DraftHead(head, ids, m), set()
    for seed in range(8):
        torch.manual_seed(seed)
        hidden_KD, u_K = torch.randn(4, 24), torch.rand(4, dtype=torch.float64)
        last, heat = seed % columns, (1.0, 0.7, 1.3)[seed % 3]
        columns_K, q_KV = drafts.chain(hidden_KD, last, heat, u_K)
        wanted = []
        for h, column in zip(hidden_KD.double(), columns_K.tolist(), strict=True):
            wanted.append((logits_of(h, last, head, m) / heat).softmax(-1))
            last = int(ids[column])
        torch.testing.assert_close(q_KV.double(), torch.stack(wanted), rtol=1e-4, atol=1e-6)
        assert columns_K.tolist() == draw_at(q_KV, u_K).tolist()
        drawn.update(columns_K.tolist())
    assert len(drawn) > 4
    for bad in ((hidden_KD.double(), u_K), (hidden_KD, u_K[:3]), (hidden_KD, u_K.float())):
        with pytest.raises(ValueError, match="belongs"):
            drafts.chain(bad[0], last, 1.0, bad[1])
