"""Flash attention gets its own layout, packed documents too."""

import itertools
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specalign.common.errors import UserError
from specalign.lm import attention
from specalign.lm.attention import attend


def flash_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn's two functions as their documentation has them, written out."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("blhd,bshd->bhls", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), v)

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, most_q: int, most_k: int
    ) -> Tensor:
        assert of_q.dtype == torch.int32 and torch.equal(of_q, of_k) and most_q == most_k
        assert most_q == int(of_q.diff().max())
        parts = (slice(*ends) for ends in itertools.pairwise(of_q.tolist()))
        return torch.cat([flash_attn_func(q[None, x], k[None, x], v[None, x])[0] for x in parts])

    stand_in = ModuleType("flash_attn")
    stand_in.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    stand_in.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    refuse = lambda query, masked: "other" if masked else ""  # noqa: E731
    monkeypatch.setattr(attention, "_flash_refusal", refuse)


def test_flash_attention_over_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_stand_in(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 4, generator=generator) for _ in range(3))
    segment = torch.tensor([[0, 0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 0, 0, 0]])
    mask = (segment[:, :, None] == segment[:, None])[:, None]
    torch.testing.assert_close(attend(q, k, v, mask, "flash_attn"), attend(q, k, v, mask))
    starts = attention.segment_starts(mask)
    assert starts is not None and starts.tolist() == [0, 3, 5, 6, 7, 14]
    for other in (torch.ones(7, 7).tril().bool(), segment[0][:, None] >= segment[0]):
        with pytest.raises(UserError, match="'flash_attn' other"):
            attend(q, k, v, other.expand(2, 1, 7, 7), "flash_attn")
