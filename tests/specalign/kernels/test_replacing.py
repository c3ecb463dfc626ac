"""Layers that stand in place of others: the same numbers, in less memory or sooner, under the same names."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specalign.kernels import linear, replacing
from specalign.kernels.pages import CACHE_LINE
from specalign.lm.inspection.parts import is_tied
from specalign.lm.loading import load_target
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from tests.target_models import tiny_model


@pytest.mark.skipif(linear.rows_library() is None, reason="no C library")
@pytest.mark.parametrize("half", [False, True])
def test_gpt2s_layers_lie_as_they_are_read(half: bool) -> None:
    """(in, out) for who asks for the weight, a row of memory for each output."""
    own = Conv1D(48, 32)
    own.weight.data = own.weight.data.bfloat16().float() if half else own.weight.data
    own.bias.data = torch.randn(48)
    model = nn.ModuleDict({"own": own, "other": nn.Linear(32, 8)})
    names = {name: t.shape for name, t in model.state_dict().items()}
    assert replacing.speed_up_linears(model, torch.float32, torch.device("cpu")) == 2
    fast = model["own"]
    assert isinstance(fast, linear.RowsConv1D) and (fast.nx, fast.nf) == (32, 48)
    assert fast.weight.dtype == (torch.bfloat16 if half else torch.float32)
    assert torch.equal(fast.weight.float(), own.weight) and fast.matrix.weight.is_contiguous()
    assert fast.weight.data_ptr() % CACHE_LINE == 0
    assert {name: t.shape for name, t in model.state_dict().items()} == names
    for rows in (1, 2, 7, 40):
        x = torch.randn(rows, 32)
        assert torch.equal(fast(x), linear.few_rows(x, own.weight.t().contiguous(), own.bias))
        torch.testing.assert_close(fast(x), own(x), rtol=1e-5, atol=1e-5)
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())
    assert torch.equal(copied["own"](x), fast(x))
    rounded = linear.RowsConv1D(own.weight.data, own.bias, torch.int8)
    assert rounded.weight.dtype == torch.int8 and rounded.matrix.scale is not None
    assert not any(p.requires_grad for layer in (fast, rounded) for p in layer.parameters())


@pytest.mark.skipif(
    linear.rows_library() is None, reason="rows.c was not compiled or is not for this processor"
)
def test_a_bf16_checkpoint_in_fp32_is_p_in_half_the_memory(tmp_path: Path) -> None:
    target = load_target("debug")
    target.model.bfloat16().save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    fast, stock = (load_target(str(tmp_path), dtype="float32", fast=fast) for fast in (True, False))
    assert fast.layers[0].mlp.up_proj.weight.dtype == fast.embedding_VD.dtype == torch.bfloat16
    assert fast.dtype == fast.model.dtype == torch.float32 and fast.fused is not None
    assert fast.hash == stock.hash
    tokens = torch.arange(3, 9).view(2, 3)
    assert torch.equal(fast.embed(tokens), stock.embed(tokens))
    for length in (1, 5, 40):
        tokens = torch.arange(3, 3 + length)[None]
        got, want = (t.forward(tokens).logits_BLV for t in (fast, stock))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(linear.rows_library() is None, reason="no C library")
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "gemma3n_text", "mamba"])
def test_an_embedding_in_bf16_is_one_with_its_head(name: str) -> None:
    """Where they are the same numbers; Gemma scales its rows."""
    tokenizer = load_target("debug").tokenizer
    model = tiny_model(name, len(tokenizer)).bfloat16().float()
    stock = prove_target(copy.deepcopy(model), tokenizer, ModelSource(name), fast=False)
    before, sizes = set(model.state_dict()), {n: p.shape for n, p in model.named_parameters()}
    fast = prove_target(model, tokenizer, ModelSource(name))
    embeddings = [m for m in model.modules() if isinstance(m, replacing.RowsEmbedding)]
    assert model.get_input_embeddings() in embeddings
    # of positions; of layers
    assert len(embeddings) == (2 if name in ("gpt2", "gemma3n_text") else 1)
    assert fast.embedding_VD.dtype == torch.bfloat16 and fast.dtype == model.dtype == torch.float32
    assert is_tied(fast) == is_tied(stock) == model.config.tie_word_embeddings
    assert set(model.state_dict()) == before and fast.hash == stock.hash
    assert {n: p.shape for n, p in model.named_parameters() if p.numel()}.items() >= sizes.items()
    tokens = torch.arange(3, 9)[None]
    assert torch.equal(fast.embed(tokens), stock.embed(tokens))
    model.load_state_dict(model.state_dict())


def test_an_embedding_that_bf16_has_not_stays() -> None:
    tokenizer = load_target("debug").tokenizer
    model = tiny_model("llama", len(tokenizer)).bfloat16().float()
    embedding = model.get_input_embeddings()
    embedding.weight.data[9, 3] += 2**-12
    target = prove_target(model, tokenizer, ModelSource("llama"))
    assert target.model.get_input_embeddings() is embedding


@pytest.mark.parametrize("compiled", [True, False])
def test_the_target_stays_the_same(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(linear, "rows_library", lambda: None)
    fast, stock = load_target("debug"), load_target("debug", fast=False)
    assert fast.hash == stock.hash
    for length in (1, 5, 40):
        tokens = torch.arange(3, 3 + length)[None]
        got, want = (t.forward(tokens).logits_BLV for t in (fast, stock))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
