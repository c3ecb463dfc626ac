"""Whether texts can stand in one row is told from numbers: ALiBi's distances can, positions that are counted in the row can't."""

from __future__ import annotations

import pytest
import torch

from align.common.batch import Batch
from align.models.target_features import target_features
from align.target.inspection.packing import same_behind
from tests.target_models import some_text, tiny_target

APART = {"llama": False, "bloom": False, "gpt_neo": False, "bart": True, "minimax_m3_vl_text": True}


@pytest.mark.parametrize("kind", APART)
def test_a_packed_text_has_its_own_states(kind: str) -> None:
    """Packed rows give what each text alone gives, for texts longer than a window; a text runs alone only where it must."""
    target = tiny_target(kind)
    texts = [some_text(target, length, seed=length) for length in (41, 37)]
    rows = [
        Batch(t, torch.arange(t.shape[1])[None], torch.full_like(t, n), t >= 0) for n, t in enumerate(texts)
    ]
    packed = Batch(*(torch.cat(parts, 1) for parts in zip(*(vars(r).values() for r in rows), strict=True)))
    found = target_features(target, packed, None).hidden_BLD.split([41, 37], dim=1)
    for mine, row in zip(found, rows, strict=True):
        own = target_features(target, row, None).hidden_BLD
        torch.testing.assert_close(mine, own, atol=1e-4, rtol=1e-3)
    assert target.apart == APART[kind]


def test_one_place_in_a_short_context() -> None:
    def by_place(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.arange(1.0, 1 + tokens.shape[1])[None, :, None]

    assert not same_behind(by_place, 10, limit=3)
    assert same_behind(lambda tokens, positions, mask: 1.0 + positions[..., None], 10, limit=3)
