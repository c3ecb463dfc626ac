"""Statistics of draft rows: what is asked for, vocabularies, chunks, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from align.common.errors import UserError
from align.losses import divergences as module
from align.losses.divergences import DIVERGENCES, DraftRows, logit_statistics, row_statistics
from align.losses.target_places import target_places
from tests.logits import Case, make


def test_statistics_of_logits_are_those_of_rows() -> None:
    """Values and gradients, where the two heads are one."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(9, 6, generator=generator), torch.randn(30, 6, generator=generator)
    text = torch.randn(5, 6, generator=generator)
    places = target_places(text, torch.tensor([3, 7, 29, 0, 11]), lambda h: h @ head.T)
    where = torch.tensor([0, 0, 1, 2, 3, 4, 4, 1, 2])
    names = frozenset(DIVERGENCES)
    grads = []
    for direct in (True, False):
        own = hidden.clone().requires_grad_()
        if direct:
            s = row_statistics(DraftRows(own, where), places, head, None, (9,), names)
        else:
            s = logit_statistics(own @ head.T, where, places, head, names)
        total = sum((i + 1) * getattr(s, n).sum() for i, n in enumerate(["log_q_label", *DIVERGENCES]))
        total.backward()
        grads.append((s, own.grad))
        assert not any(x.requires_grad for x in (s.acceptance, s.p_label, s.match, s.greedy_label))
    for name in ("log_q_label", "acceptance", "p_label", "match", "greedy_label", *DIVERGENCES):
        torch.testing.assert_close(getattr(grads[0][0], name), getattr(grads[1][0], name))
    torch.testing.assert_close(grads[0][1], grads[1][1], atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="unknown divergence 'kl'"):
        logit_statistics(hidden @ head.T, where, places, head, frozenset({"kl"}))


def test_cpu_blocks_equal_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a kept chunk a CPU works in blocks of what its cache holds."""
    case = make(seed=8, rank=3)
    whole = torch.autograd.grad(case.statistics().forward_kl.sum(), case.leaves)
    rows, apply = list[int](), module.Rows.apply
    monkeypatch.setattr(module.Rows, "apply", lambda *given: rows.append(len(given[0])) or apply(*given))
    monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", 4 * len(case.head_VD) * 5)
    monkeypatch.setattr(module, "_CPU_CHUNK_ROWS", 4)
    case.statistics()
    assert rows == [5, 5, 5, 3]
    monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", 1)
    for a, b in zip(whole, torch.autograd.grad(case.statistics().forward_kl.sum(), case.leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_match_is_false_where_the_best_token_cannot_be_drafted() -> None:
    case = make(seed=11, anchors=60)
    best = case.places.best_P
    case.draft_vocab = torch.tensor([t for t in range(17) if t != int(best[0])])
    at_first = (case.rows.place_R == 0).view(case.shape)
    assert bool(at_first.any()) and float(case.statistics().match[at_first].sum()) == 0


def saved_bytes(case: Case, chunk_rows: int) -> int:
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        case.statistics(frozenset({"forward_kl"}), chunk_rows)
    return sum(sizes.values())


def test_memory_does_not_grow_with_rows_times_vocabulary() -> None:
    few, many = (make(anchors=a, block=4, vocabulary=2000, kept=1500) for a in (16, 160))
    grown = saved_bytes(many, 16) - saved_bytes(few, 16)
    assert grown < 576 * 200, "a few numbers a row, not a row of the vocabulary"
    assert saved_bytes(many, 10**6) > 640 * 1500 * 4, "the measurement sees what one large chunk keeps"
