"""Tiny models as llama.cpp's converter writes them into GGUF files, of architectures that it stores in another layout than the hub's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.target_models import add_piece_tokenizer, tensor_names, write_out

LAYOUTS = {
    "qwen2moe": "qwen2_moe",
    "minimax-m2": "minimax_m2",
    "lfm2": "lfm2",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}
"""transformers' names of the architectures."""


def _tiled(rows: Tensor, groups: int, each: int = 1) -> Tensor:
    """Value heads of `each` rows, put together by key head, as llama.cpp has them: the first of every key head first."""
    return rows.reshape(groups, -1, each, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _linear(part: str, tensor: Tensor, config: Any) -> tuple[str, Tensor]:
    """A tensor of Qwen3.5's linear attention."""
    heads, value, mixed = config.linear_num_key_heads, config.linear_value_head_dim, tensor
    keys = 2 * heads * config.linear_key_head_dim
    if part == "A_log":
        return "A_log", -_tiled(tensor, heads).exp()
    if part == "dt_bias":
        return "dt_proj.bias", _tiled(tensor, heads)
    if part in ("in_proj_a.weight", "in_proj_b.weight"):
        return part, _tiled(tensor, heads)
    if part == "in_proj_z.weight":
        return part, _tiled(tensor, heads, value)
    if part == "out_proj.weight":
        return part, _tiled(tensor.T, heads, value).T
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        mixed = tensor.squeeze(1)
        return part, torch.cat((mixed[:keys], _tiled(mixed[keys:], heads, value)))
    return part, tensor


def _parts(
    name: str, tensor: Tensor, config: Any, architecture: str
) -> Iterator[tuple[str, Tensor]]:
    """What is stored of one of the model's tensors, under the names that `gguf` knows."""
    where, _, part = name.rpartition("linear_attn.")
    if where:
        part, tensor = _linear(part, tensor, config)
        yield f"{where}linear_attn.{part}", tensor
    elif name.endswith("experts.gate_up_proj"):
        for kind, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", f"{kind}_proj.weight"), half
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    elif name.endswith("shared_expert_gate.weight"):
        yield name, tensor[0]
    elif name.endswith("conv.conv.weight"):
        yield name, tensor[:, 0]
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("correction_bias", "correction.bias"), tensor
    else:
        yield name, tensor + (architecture.startswith("qwen35") and "norm" in name)


def _keys(architecture: str, model: Any) -> dict[str, Any]:
    """What the file says beside what all say."""
    config = model.config
    said: dict[str, Any] = {"expert_used_count": getattr(config, "num_experts_per_tok", None)}
    if architecture == "lfm2":
        of_each = [config.num_key_value_heads * (t == "full_attention") for t in config.layer_types]
        width = model.model.layers[0].feed_forward.w1.out_features
        return {
            "attention.head_count_kv": of_each,
            "shortconv.l_cache": config.conv_L_cache,
            "feed_forward_length": width,
        }
    turned = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if architecture != "qwen2moe":
        said |= {
            "attention.key_length": config.head_dim,
            "rope.dimension_count": int(turned * config.head_dim),
        }
    if architecture.startswith("qwen35"):
        heads = config.linear_num_value_heads
        said |= {
            "nextn_predict_layers": 1, "full_attention_interval": 4, "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": heads, "ssm.inner_size": heads * config.linear_value_head_dim,
            "rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0],
        }  # fmt: skip
    if architecture == "minimax-m2":
        said |= {
            "expert_count": config.num_local_experts,
            "expert_feed_forward_length": config.intermediate_size,
            "expert_gating_func": 2,
        }
    elif architecture != "qwen35":
        said |= {
            "expert_count": config.num_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
        said |= {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    return said


def write_layout(path: Path, model: Any, architecture: str) -> Path:
    """The model as a GGUF file of that architecture, its vocabulary `tests.target_models.piece_fields`."""
    config, writer = model.config, gguf.GGUFWriter(str(path), architecture)
    draft_layers = int(architecture.startswith("qwen35"))  # for multi-token prediction
    said = {
        "block_count": config.num_hidden_layers + draft_layers, "context_length": 512, "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None), "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, **_keys(architecture, model),
    }  # fmt: skip
    for key, value in said.items():
        if value is not None:
            (writer.add_array if isinstance(value, list) else writer.add_uint32)(
                f"{architecture}.{key}", value
            )
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add_piece_tokenizer(writer)
    names = tensor_names(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, stored in _parts(name, tensor, config, architecture):
            stem, _, last = part.rpartition(".")
            whole = last not in ("weight", "bias")
            found = names.get_name(part if whole else stem)
            assert found is not None, part
            writer.add_tensor(
                found if whole else f"{found}.{last}", np.ascontiguousarray(stored.numpy())
            )
    if draft_layers:
        writer.add_tensor(
            f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.ones((4, 8), np.float32)
        )
    write_out(writer)
    return path
