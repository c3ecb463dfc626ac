"""Weights that a model reads past their layers keep the type that the model gave them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from align.kernels.linear import rows_library
from align.target.debug import debug_model
from align.target.inspection.reads import watch_reads
from align.target.proof import prove_target
from align.target.source import ModelSource
from tests.target_models import some_text, tiny_model


class Mixed(nn.Module):
    """`called` is called, `read` gives its weight, `both` gives its type and is called, `idle` has no part."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read, self.both, self.idle = (nn.Linear(4, 4) for _ in range(4))
        self.tokens = nn.Embedding(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.both(self.called(x).to(self.both.weight.dtype)) @ self.read.weight


def test_layers_whose_weights_others_read() -> None:
    model = Mixed()
    with watch_reads(model) as found:
        assert found == set()
        model(torch.tensor([1]))
    assert found == {model.read, model.both}
    assert {type(m) for m in model.children()} == {nn.Linear, nn.Embedding}
    with pytest.raises(IndexError), watch_reads(model) as found:
        model(torch.tensor([9]))
    assert not found and type(model.tokens) is nn.Embedding


@pytest.mark.skipif(rows_library() is None, reason="no C library")
@pytest.mark.parametrize(("name", "kept"), [("mamba", "mixer.dt_proj"), ("dots3_note_text", "weights_proj")])
def test_a_bf16_checkpoint_of_such_a_model_is_p(name: str, kept: str) -> None:
    tokenizer = debug_model("Llama")[1]
    model = tiny_model(name, len(tokenizer)).bfloat16().float()
    stock, fast = (
        prove_target(copy.deepcopy(model), tokenizer, ModelSource(name), fast=fast) for fast in (False, True)
    )
    types = {n: m.weight.dtype for n, m in fast.body.named_modules() if type(m).__name__ == "RowsLinear"}
    whole = {n for n, dtype in types.items() if dtype == torch.float32}
    assert whole and all(n.endswith(kept) for n in whole) and len(whole) < len(types)
    tokens = some_text(fast, 6)
    got, wanted = (t.forward(tokens).logits_BLV for t in (fast, stock))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert fast.hash == stock.hash
