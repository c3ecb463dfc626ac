"""What a GGUF file says of norms, experts and rotary positions is the model's; no tensor is
dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specalign.common.errors import UserError
from specalign.gguf.config import complete_config
from specalign.gguf.header import Header, StoredTensor
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from tests.target_models import (
    add_byte_tokenizer,
    tensor_names,
    tiny_config,
    tiny_model,
    write_out,
)

VOCAB = 260


def write_experts(path: Path, model: Any, tensors: dict[str, Tensor]) -> Path:
    """A Qwen3-MoE model; a tensor of no dimension is left out."""
    config, kind = model.config, "qwen3moe"
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(16)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)
    add_byte_tokenizer(writer, debug_model("Llama")[1])
    names = tensor_names(kind, config.num_hidden_layers)
    stored = {
        f"{names.get_name(name.rpartition('.')[0])}.{name.rpartition('.')[2]}": tensor
        for name, tensor in model.state_dict().items()
        if "experts" not in name and (name != "lm_head.weight" or not config.tie_word_embeddings)
    }
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        parts = (*experts.gate_up_proj.data.chunk(2, 1), experts.down_proj.data)
        named = zip(("gate", "up", "down"), parts, strict=True)
        stored |= {f"blk.{i}.ffn_{name}_exps.weight": part for name, part in named}
    for name, tensor in {**stored, **tensors}.items():
        if tensor.dim():
            writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    write_out(writer)
    return path


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, None),
        ({"blk.3.attn_k.weight": torch.tensor(0)}, r"lacks 'model\.layers\.3\.self_attn\.k_proj\.weight' of a qwen3moe model"),
        ({"blk.0.attn_q.bias": torch.ones(64)}, r"holds [\d,]+ weights, the qwen3moe model built from it"),
        ({"blk.0.attn_k.weight": torch.ones(48, 64)}, r"or has it in another shape"),
    ],
)  # fmt: skip
def test_a_files_model_is_the_model_or_refused(
    tensors: dict[str, Tensor], says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of the width that the file says; the reader would continue with random weights, or
    without a tensor."""
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "cache"))
    own = tiny_model("qwen3_moe", VOCAB, norm_topk_prob=True)
    path = write_experts(tmp_path / "m.gguf", own, tensors)
    if says is not None:
        with pytest.raises(UserError, match=says):
            load_target(str(path), "float32", "cpu")
        return
    tokens = torch.arange(4, 64)[None]
    found = load_target(str(path), "float32", "cpu").forward(tokens).logits_BLV
    torch.testing.assert_close(found, own(tokens).logits, rtol=1e-4, atol=1e-4)


def complete(config: Any, **values: Any) -> Any:
    """The config completed by a header of a Llama with heads of 16."""
    own = {"attention__head_count": 4, "embedding_length": 64, **values}
    named = {f"llama.{key.replace('__', '.')}": value for key, value in own.items()}
    tensors = {"token_embd.weight": StoredTensor((VOCAB, 64), 0, 0)}
    header = Header({"general.architecture": "llama", **named}, tensors)
    complete_config(Path("m.gguf"), header, config)
    return config


def test_rotary_base_and_scale_are_the_files() -> None:
    values = {"rope__freq_base": 999999.4375, "rope__scaling__factor": 4.0}
    config = complete(tiny_config("llama", VOCAB), **values)
    buffers = AutoModelForCausalLM.from_config(config).named_buffers()
    (found,) = [b for name, b in buffers if name.endswith(".inv_freq")]
    torch.testing.assert_close(found, 999999.4375 ** -(torch.arange(0, 16, 2) / 16) / 4)


def test_a_partial_rotary_width_is_refused() -> None:
    with pytest.raises(UserError, match=r"rope.dimension_count=8: partial rotary width of 16"):
        complete(tiny_config("llama", VOCAB), rope__dimension_count=8)
