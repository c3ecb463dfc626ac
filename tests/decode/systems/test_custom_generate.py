"""`decode.custom_generate` and the model that it is given. (Its outputs: tests/decode/portable/test_generate.py.)"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import decode
from specalign.common.errors import UserError
from tests.builders import PROMPT

IDS = torch.tensor([PROMPT])
OURS: dict[str, Any] = {
    "custom_generate": decode.custom_generate, "drafter": "lookup", "max_new_tokens": 8, "pad_token_id": 0,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("stock")


def test_the_model_stays_as_it_was(model: Any, drafter: str) -> None:
    model.train().requires_grad_(True)
    before = model.config._attn_implementation
    torch.manual_seed(3)
    random = torch.get_rng_state()
    other = copy.deepcopy(model)
    other.generate(IDS, **{**OURS, "drafter": drafter}, do_sample=False)
    assert torch.equal(torch.get_rng_state(), random)  # also where the drafter is opened
    assert other.config._attn_implementation == before and other.training
    assert all(p.requires_grad for p in other.parameters())
    model.eval().requires_grad_(False)


def test_a_model_that_is_trained_between_two_calls(model: Any) -> None:
    own = copy.deepcopy(model)
    words: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    before = own.generate(IDS, **OURS, do_sample=False)
    with torch.no_grad():
        own.model.layers[1].mlp.down_proj.weight.mul_(-3)
    after = own.generate(IDS, **OURS, do_sample=False)
    assert torch.equal(after, own.generate(IDS, **words)) and not torch.equal(before, after)
    assert torch.equal(copy.deepcopy(own).generate(IDS, **OURS, do_sample=False), after)


def _offload(model: Any) -> Any:
    """As accelerate leaves a model whose weights lie elsewhere until a call reads them."""
    model.model.layers[1].mlp.up_proj.to("meta")
    return model


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda m: m.double(),
            "its weights are float64; only float32, bfloat16 and float16 are supported",
        ),
        (_offload, "^model.layers.1.mlp.up_proj.weight is offloaded: load the model without"),
    ],
    ids=["float64", "offloaded"],
)
def test_models_that_it_cannot_run_exactly(
    model: Any, change: Callable[[Any], Any], says: str
) -> None:
    """Also where the model was opened before."""
    other = copy.deepcopy(model)
    other.generate(IDS, **OURS)
    with pytest.raises(UserError, match=says):
        change(other).generate(IDS, **OURS)
