"""Weights that a model reads past their layers keep the type that the model gave them."""

from __future__ import annotations

import copy

import pytest
import torch

from specalign.kernels.linear import rows_library
from specalign.lm.debug import debug_model
from specalign.lm.proof import prove_target
from specalign.lm.source import ModelSource
from tests.target_models import some_text, tiny_model


@pytest.mark.skipif(rows_library() is None, reason="no C library")
@pytest.mark.parametrize(
    ("name", "kept"), [("mamba", "mixer.dt_proj"), ("dots3_note_text", "weights_proj")]
)
def test_a_bf16_checkpoint_of_such_a_model_is_p(name: str, kept: str) -> None:
    tokenizer = debug_model("Llama")[1]
    model = tiny_model(name, len(tokenizer)).bfloat16().float()
    stock, fast = (
        prove_target(copy.deepcopy(model), tokenizer, ModelSource(name), fast=fast)
        for fast in (False, True)
    )
    types = {
        n: m.weight.dtype for n, m in fast.body.named_modules() if type(m).__name__ == "RowsLinear"
    }
    whole = {n for n, dtype in types.items() if dtype == torch.float32}
    assert whole and all(n.endswith(kept) for n in whole) and len(whole) < len(types)
    tokens = some_text(fast, 6)
    got, wanted = (t.forward(tokens).logits_BLV for t in (fast, stock))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert fast.hash == stock.hash
