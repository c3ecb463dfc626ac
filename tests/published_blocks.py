"""Block drafters' folders as their makers publish them, written by hand: config.json and tensors of DFlash, DSpark and speculators."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specalign.lm.model import Target

ROWS, TAPS, LAYERS = 5, [0, 2], 2
IDS = torch.cat((torch.arange(2, 3), torch.arange(10, 250, 2)))
"""A pruned draft vocabulary."""


def shape_of(target: Target) -> dict[str, Any]:
    """The layers, of other sizes than the target's own."""
    return {
        "hidden_size": target.hidden_size, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "vocab_size": target.vocab_size, "max_position_embeddings": 512, "rope_scaling": None,
        "rope_theta": 1000000, "tie_word_embeddings": True, "use_cache": True, "use_sliding_window": False, "sliding_window": None,
        "initializer_range": 0.02, "layer_types": ["full_attention"] * LAYERS,
    }  # fmt: skip


def dflash_config(target: Target, **changes: Any) -> dict[str, Any]:
    """As on the hub beside DFlash's models for Qwen3: no flat ids, no `is_causal`."""
    return {
        **shape_of(target),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": ROWS,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": TAPS},
        "dtype": "bfloat16",
        "num_target_layers": target.num_layers,
        "transformers_version": "4.57.3",
        **changes,
    }


def dspark_config(target: Target, kind: str, rank: int, **changes: Any) -> dict[str, Any]:
    return {
        **shape_of(target),
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": ROWS,
        "mask_token_id": 3,
        "target_layer_ids": TAPS,
        "num_target_layers": target.num_layers,
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        **changes,
    }


def speculators_config(target: Target, kind: str = "dflash", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": {**shape_of(target), "model_type": "qwen3"},
        "draft_vocab_size": len(IDS),
        "block_size": ROWS,
        "aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
        "mask_token_id": 3,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind, "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": ROWS - 1}],
            "default_proposal_method": "greedy", "verifier": {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]},
        },
        **changes,
    }  # fmt: skip


def backbone(target: Target, seed: int = 0) -> dict[str, Tensor]:
    """Layers, norms and projection, random and nowhere zero."""
    width, generator = target.hidden_size, torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return 1 + 0.1 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5

    found = {
        "fc.weight": drawn(width, len(TAPS) * width),
        "hidden_norm.weight": drawn(width),
        "norm.weight": drawn(width),
    }
    for i in range(LAYERS):
        name = f"layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.{norm}.weight"] = drawn(width)
        for norm in ("q_norm", "k_norm"):
            found[f"{name}.self_attn.{norm}.weight"] = drawn(8)
        for part, size in (("q", 32), ("k", 16), ("v", 16)):
            found[f"{name}.self_attn.{part}_proj.weight"] = drawn(size, width)
        found[f"{name}.self_attn.o_proj.weight"] = drawn(width, 32)
        found[f"{name}.mlp.gate_proj.weight"] = drawn(48, width)
        found[f"{name}.mlp.up_proj.weight"] = drawn(48, width)
        found[f"{name}.mlp.down_proj.weight"] = drawn(width, 48)
    return found


def markov_tensors(
    target: Target, kind: str, rank: int, vocabulary: int, stateless: bool = True
) -> dict[str, Tensor]:
    """A Markov head of DSpark's, its biases not zero."""
    width, generator = target.hidden_size, torch.Generator().manual_seed(9)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found = {
        "markov_head.markov_w1.weight": drawn(target.vocab_size, rank),
        "markov_head.markov_w2.weight": drawn(vocabulary, rank),
    }
    if kind == "gated":
        found |= {
            "markov_head.gate_proj.weight": drawn(rank, width + rank),
            "markov_head.gate_proj.bias": drawn(rank),
        }
    if kind == "rnn":
        weight = drawn(3 * rank, 2 * rank + width)
        if stateless:
            weight[2 * rank :, :rank] = 0
        found |= {
            "markov_head.joint_proj.weight": weight,
            "markov_head.joint_proj.bias": drawn(3 * rank),
        }
    return found


def pruned(target: Target, change: float = 0.0, seed: int = 4) -> dict[str, Tensor]:
    """A pruned vocabulary with the head's rows, which differ from the target's by `change` of their size."""
    rows = target.head_weight_VD.detach().float()[IDS].clone()
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
    rows += change * rows.std() * noise
    known = torch.zeros(target.vocab_size, dtype=torch.bool)
    known[IDS] = True
    return {"d2t": IDS - torch.arange(len(IDS)), "t2d": known, "lm_head.weight": rows}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {n: t.clone().contiguous() for n, t in tensors.items()}, str(folder / "model.safetensors")
    )
    return folder
