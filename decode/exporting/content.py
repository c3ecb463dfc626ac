"""What formats share of a block drafter's content: Qwen3's config, tensors under their published names, a draft vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.target.inspection.parts import embedding_scale
from decode.exporting.folder import EMBEDDING, Exported


def rope_parameters(drafter: BlockDrafter, name: str) -> dict[str, Any]:
    """`rope_parameters` that turn keys as this drafter's layers do. Raises UserError where the format has none."""
    c, target = drafter.config, drafter.target
    if (published := c.extra.get("rope_parameters")) is not None:  # of the engine that it came from
        return dict(published)
    if c.rotaries:
        plain = _plain_theta(c)
        if plain is None:
            raise UserError(
                f"--format {name}: its keys are rotated whole and in halves, by one base; this drafter's are not (part of a head, "
                "neighbouring pairs or another base in each layer): no engine's format holds them"
            )
        return {"rope_type": "default", "rope_theta": plain}
    found = dict(getattr(target.config, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in found.values()):  # one for each kind of layer
        found = dict(found.get("full_attention") or next(v for v in found.values() if isinstance(v, dict)))
    # of images: in text all their places are one, and vLLM refuses drafters that have them
    found = {key: value for key, value in found.items() if not key.startswith("mrope_")}
    return {"rope_type": "default", **found, "rope_theta": float(found.get("rope_theta") or c.rope_theta)}


_VLLM = {
    "ForCausalLM": "Afmoe Apertus Cohere2Moe DeepseekV2 DeepseekV3 Ernie4_5 Gemma4 GptOss Granite Laguna Llama Llama4 MiMoV2Flash MiniCPM3 "
    "MiniMaxM2 Ministral3 Mistral NemotronH Phi3 Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe",
    "ForConditionalGeneration": "Exaone4_5_ Gemma4 Gemma4Unified Llama4 Llava Mistral3 MuseGlimmer Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 "
    "Qwen3_5Moe",
}
"""Targets whose hidden states vLLM 0.32 hands to drafters: those of its models that have its interface SupportsEagle3."""


def vllm_refuses(drafter: BlockDrafter) -> str:
    """Why vLLM serves no drafter for this target; empty = it does."""
    rope = getattr(drafter.target.config, "rope_parameters", None) or {}
    if not drafter.config.rotaries and rope.get("rope_type") == "longrope":
        return "its keys turn by longrope: vLLM's drafters have one table alone, and can't load it"
    kind = type(drafter.target.model).__name__
    if not any(kind == name + end for end, names in _VLLM.items() for name in names.split()):
        return f"vLLM 0.32 gives drafters no hidden states of {kind}, its target's class; a later one may"
    return ""


def _plain_theta(config: BlockConfig) -> float | None:
    """The base where every layer rotates whole heads in halves by base^(−2i/d)."""
    one = config.rotaries[0]
    if any(r != one for r in config.rotaries) or not one.full(config.head_dim) or len(one.inv_freq) < 2:
        return None
    theta = one.inv_freq[1] ** (-config.head_dim / 2)
    plain = [theta ** (-2 * i / config.head_dim) for i in range(len(one.inv_freq))]
    fits = all(abs(a / b - 1) < 1e-4 for a, b in zip(one.inv_freq, plain, strict=True))
    return theta if fits else None


def qwen3_config(drafter: BlockDrafter) -> dict[str, Any]:
    """The layers as Qwen3's config says them."""
    c, target = drafter.config, drafter.target
    rope, layers = rope_parameters(drafter, "dflash"), len(c.init_layer_ids)
    return {
        "model_type": "qwen3",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.hidden_act,
        "rms_norm_eps": c.rms_norm_eps,
        "attention_bias": c.attention_bias,
        "attention_dropout": 0.0,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": target.context_limit,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "layer_types": ["full_attention"] * layers,
        "is_causal": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def taps_config(drafter: BlockDrafter) -> dict[str, Any]:
    """Blocks and tapped layers: id i is what layer i writes, transformers' hidden_states[i + 1]."""
    c = drafter.config
    return {
        "block_size": c.rows,
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.target_layer_ids),
        "num_target_layers": c.num_target_layers,
    }


def published_tensors(drafter: BlockDrafter) -> dict[str, Tensor]:
    """Layers, norms and projection: the names are the published ones."""
    heads = ("markov.", "confidence.")
    found = {n: p.detach() for n, p in drafter.named_parameters() if not n.startswith(heads)}
    if drafter.config.attention_bias:  # Qwen3's option puts one on this projection too
        for i, layer in enumerate(drafter.blocks):
            weight = layer.self_attn.o_proj.weight
            found[f"layers.{i}.self_attn.o_proj.bias"] = weight.new_zeros(weight.shape[0])
    return found


def add_pruned(made: Exported, drafter: BlockDrafter, who: str = "") -> None:
    """A draft vocabulary: the head's rows, and for each of them how far its token lies behind its row."""
    vocab = drafter.draft_vocab
    if vocab is None:
        return
    made.config["draft_vocab_size"] = len(vocab)
    made.tensors["d2t"] = vocab - torch.arange(len(vocab), device=vocab.device)
    made.tensors["lm_head.weight"] = drafter.head_weight_VdD
    if who:
        made.notes.append(f"its draft vocabulary is in d2t and lm_head.weight: {who}")


def suit_vllm(made: Exported, drafter: BlockDrafter) -> None:
    """What vLLM needs beside, and what it can't serve. Where the target scales its embedding (Gemma), the scaled rows: vLLM and the
    speculators package read a folder's own rows, or else the target's as they stand, and know no scale."""
    c, target = drafter.config, drafter.target
    if (scale := embedding_scale(target)) != 1:
        everything = torch.arange(c.vocab_size, device=drafter.norm.weight.device)
        made.tensors[EMBEDDING] = target.embed(everything).detach()
        made.notes.append(
            f"its target multiplies embeddings by {scale:g}: the rows for it are in {EMBEDDING}, in fp32, for vLLM and the "
            "speculators package, which would read the target's without that"
        )
    if why := vllm_refuses(drafter):
        made.notes.append(why)
    if c.hidden_act != "silu":
        made.notes.append(f"its activation is {c.hidden_act}: vLLM and SGLang serve drafters with silu alone")
