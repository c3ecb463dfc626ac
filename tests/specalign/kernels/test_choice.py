"""Choices in one call: torch's own argmax, and the rule `block` of verification, its ends and its draws."""

import math

import pytest
import torch
from torch import Tensor

from decode.speculation import rules
from decode.speculation.drafts import Drafts
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.sampling import draw_at
from specalign.kernels import choice
from specalign.kernels.linear import rows_library

pytestmark = pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")


@pytest.mark.parametrize("size", [1, 7, 8, 9, 513, 5000])
def test_the_largest_of_each_row_is_torchs_argmax(size: int) -> None:
    torch.manual_seed(size)
    rows = torch.randint(-3, 3, (6, size)).float()  # full of ties
    rows[1], rows[2] = -math.inf, torch.randn(size)
    rows[3, size // 2], rows[4, -1] = math.nan, 7.0
    assert choice.largest(rows).tolist() == rows.argmax(-1).tolist()


def test_choices_take_contiguous_fp32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.zeros(2, 3)
    assert choice.takes(row, row)
    for other in (row.double(), row.t(), row.to("meta")):
        assert not choice.takes(row, other)
    monkeypatch.setattr(choice, "rows_library", lambda: None)
    assert not choice.takes(row)


def a_chain(seed: int) -> tuple[Tensor, Proposal]:
    """Of all kinds: a pruned vocabulary or all of it; p like q, p far from it, p with zeros, p = q; a q that is broken."""
    torch.manual_seed(seed)
    count, size = 1 + seed % 5, (5, 40, 1300)[seed % 3]
    pruned = seed % 2 == 1
    ids = torch.randperm(size)[: size // 2 + 1] if pruned else None
    columns = size if ids is None else len(ids)
    q_KS = (2 * torch.randn(count, columns)).softmax(-1)
    dense_KV = DraftProbs(q_KS, ids).dense(size)
    p_MV = (2 * torch.randn(count + 1, size)).softmax(-1)
    likeness = (0.0, 0.5, 0.99, 1.0)[seed // 3 % 4]
    p_MV[:-1] = likeness * dense_KV + (1 - likeness) * p_MV[:-1]
    if seed % 7 == 0:
        p_MV[:, 1:][torch.rand_like(p_MV[:, 1:]) < 0.3] = 0.0
    at = q_KS.multinomial(1)[:, 0]
    if seed % 11 == 0:
        q_KS[seed % count] = math.nan
    tokens_K = at if ids is None else ids[at]
    return p_MV, Proposal(tokens_K, "causal", DraftProbs(q_KS, ids))


@pytest.mark.parametrize("seed", range(24))
def test_block_verification_is_the_rules(seed: int) -> None:
    p_MV, proposal = a_chain(seed)
    stop_BM, rest_BMV = rules.block(p_MV[None], Drafts.of([proposal], p_MV.shape[1]))
    rest_MV = rules.fall_back_to_p(rest_BMV[0], p_MV)
    assert proposal.q is not None
    q_KS, ids, ends = proposal.q.probs, proposal.q.ids, set()
    draws = torch.rand(150, 2, dtype=torch.float64)
    last = 1 - 2**-53
    draws[:4] = torch.tensor([[0.0, 0.0], [0.0, last], [last, 0.0], [last, last]])
    stops_M = []
    for u_2 in draws:
        found = choice.verified_chain(p_MV, q_KS, ids, proposal.tokens_K, u_2)
        stops_M.append(torch.tensor(found.stop, dtype=torch.float64))
        end = int(draw_at(stops_M[-1][None], u_2[:1])[0])
        assert found.accepted == end
        u_3 = (u_2[1] + torch.tensor([-1e-6, 0.0, 1e-6])).clamp(0, 1 - 2**-53)
        near = draw_at(rest_MV[end].expand(3, -1), u_3).tolist()
        assert found.following in near and rest_MV[end, found.following] > 0
        ends.add(end)
    expected_RM = stop_BM[0].expand(len(draws), -1)
    torch.testing.assert_close(torch.stack(stops_M), expected_RM, rtol=0, atol=2e-6)
    assert len(ends) > 1 or float(stop_BM.max()) > 0.97
