"""A model that makes a cache of its own gets one of ours that answers it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from align.common.errors import UserError
from align.target.cache import KVCache
from align.target.inspection.anatomy import decoder
from align.target.inspection.own_cache import CacheKinds, cache_kinds, cache_of_its_own
from tests.target_models import generated, some_text, tiny_model, tiny_target


def test_a_usual_model_is_asked_nothing() -> None:
    body = decoder(tiny_model("llama", 260))
    body.forward = None  # type: ignore[assignment]
    assert cache_of_its_own(body, "cache", torch.device("cpu")) is None
    assert cache_kinds(body, "cache", torch.device("cpu")) == CacheKinds(DynamicCache, KVCache)


@pytest.mark.parametrize(("kind", "attending"), [("minimax", 2), ("xlstm", 0)])
def test_plain_decoding_is_generates_by_its_own_cache(kind: str, attending: int) -> None:
    target, own = tiny_target(kind), tiny_model(kind, 260)
    assert target.anatomy.recurrent and sum(shape is not None for shape in target.anatomy.shapes) == attending
    tokens = some_text(target, 30)
    cache, written = target.new_cache(1, 40), [int(tokens[0, -1])]
    target.forward(tokens[:, :-1], cache=cache)
    for _ in range(8):
        found = target.forward(torch.tensor([written[-1:]]), cache=cache).logits_BLV
        assert found is not None
        written.append(int(found[0, -1].argmax()))
    assert written[1:] == generated(own, target, tokens[0].tolist(), 8)
    rows = target.new_cache(3, 40)  # states of as many rows
    one = target.forward(tokens[:, :7], cache=target.new_cache(1, 40)).logits_BLV
    three = target.forward(tokens[:, :7].expand(3, -1), cache=rows).logits_BLV
    assert one is not None and three is not None
    torch.testing.assert_close(three, one.expand(3, -1, -1), rtol=1e-4, atol=1e-4)


class OddCache:
    """One that no code here knows."""


class OddBody:
    def __call__(self, **given: Any) -> dict[str, Any]:
        return {"cache": OddCache()}


def test_a_cache_of_another_kind_is_refused_by_its_name() -> None:
    with pytest.raises(NotImplementedError, match="its past in a OddCache of its own, which can't be rolled"):
        cache_kinds(OddBody(), "cache", torch.device("cpu"))


@pytest.mark.parametrize(("kind", "where"), [("rwkv", "state"), ("reformer", "past_buckets_states")])
def test_a_past_elsewhere_is_refused_with_its_name(kind: str, where: str) -> None:
    with pytest.raises(
        UserError, match=f"it keeps nothing in a cache: its past is in '{where}', which can't be rolled back"
    ):
        tiny_target(kind)
