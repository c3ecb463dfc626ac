"""Tiny random models of transformers that hold a text model beside towers for images or sound, saved as folders in hub layout."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from specalign.lm.debug import debug_model
from tests.target_models import COMMON, OWN, WINDOW, _takes

CLASSES = (
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
)
TOWER: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1, "num_layers": 1, "layers": 1,
    "num_attention_heads": 2, "num_heads": 2, "heads": 2, "num_key_value_heads": 2, "image_size": 28, "patch_size": 14,
    "out_hidden_size": 64, "projection_dim": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "d_model": 32, "mlp_dim": 48, "n_layers": 1, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "window_size": 28,
    "head_dim": 16, "vocab_size": 260, "decoder_layers": 1, "decoder_ffn_dim": 32, "decoder_attention_heads": 2,
    "text_hidden_size": 64,
}  # fmt: skip
"""What a tower's config gets where it has a key of that name."""


def _sections(*parts: int) -> dict[str, Any]:
    """Rotary angles that three positions share."""
    angles = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(parts)}
    return {"rope_parameters": angles}


TEXT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "qwen2_5_omni_thinker", "glm4v", "glm46v", "glm_ocr", "glmga", "cosmos3_edge"),
        _sections(2, 3, 3),
    ),
    "glm4v_moe": _sections(1, 1, 2),
    "llama4": OWN["llama4_text"],
    **dict.fromkeys(("gemma4", "gemma4_unified"), {"num_kv_shared_layers": 0}),
    "ernie4_5_vl_moe": {"moe_intermediate_size": [32, 32], **_sections(3, 3, 2)},
    "step3p7": {"sliding_window": WINDOW},
    "hunyuan_vl": _sections(2, 2, 2, 2),
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "crop_size": 28, "image_size": 28},
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2, "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32,
        },
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"] * 2, "num_key_value_heads": 4, "num_experts_per_tok": 2},
    "mistral_large4": {"num_key_value_heads": 4, "head_dim": 16, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 16},
    "hy_v4_vl": {
        "index_topk": 16, "index_head_dim": 16, "index_n_heads": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    },
    "glm5_next": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 16, "index_kpool": 4, "index_head_dim": 16, "index_n_heads": 16, "linear_head_dim": 16, "linear_num_heads": 2},
    "molmo2": {"additional_vocab_size": 8},
    "qwen4_exp": OWN["qwen4_exp_text"],
}  # fmt: skip
"""By architecture, what its text model needs beside."""
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 8, "num_embeddings": 16, "num_res_blocks": 1}},
    "apertus1p5": {"": {"image_token_offset": 100, "audio_token_offset": 104}, "vision_config": {"codebook_size": 4, "base_channels": 32, "num_res_blocks": 1}, "audio_config": {"codebook_dim": 32, "codebook_size": 4}},
    "molmo2": {"vision_config": {"image_size": [28, 28]}, "adapter_config": {"vision_feature_layer": [0]}},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": [16, 32, 32, 32]}},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "granite4_vision": {"": {"deepstack_layer_map": [], "spatial_target_layers": [], "downsample_rate": "1/2"}, "vision_config": {"hidden_size": 64}},
}  # fmt: skip
"""By architecture, what its towers need beside, and under "" what its config itself."""


def _tower(config: Any, **more: Any) -> Any:
    given = {key: value for key, value in TOWER.items() if _takes(config, key)}
    for name in getattr(config, "sub_configs", None) or {}:
        if hasattr(part := getattr(config, name, None), "to_dict"):
            given[name] = _tower(part)
    return type(config)(**given | more)


def wrapper_config(kind: str, vocab_size: int, **more: Any) -> Any:
    """A small config of the architecture `kind`, its text model as in `tests.target_models`."""
    made = transformers.AutoConfig.for_model(kind)
    text = made.get_text_config(decoder=True)
    given = {key: value for key, value in COMMON.items() if _takes(text, key)}
    given |= {"vocab_size": vocab_size, **OWN.get(text.model_type, {})}
    given |= {**TEXT.get(kind, {}), **more}
    if text is made:
        return type(made)(**given)
    own = PARTS.get(kind, {})
    parts = {name: getattr(made, name, None) for name in made.sub_configs}
    parts = {
        name: type(text)(**given) if part is text else _tower(part, **own.get(name, {}))
        for name, part in parts.items()
        if part is not None
    }
    marks = [
        f"{what}_token_{end}" for what in ("image", "video", "audio") for end in ("id", "index")
    ]
    top = {mark: 5 for mark in marks if _takes(made, mark)}
    top |= {"vocab_size": vocab_size} if _takes(made, "vocab_size") else {}
    config = type(made)(**parts, **top | own.get("", {}))
    if "omni" in kind and kind.endswith("thinker"):  # read by generate, not in the config
        config.vision_start_token_id, config.audio_start_token_id = 6, 7
    return config


def tiny_wrapper(kind: str, vocab_size: int = 260, seed: int = 0, **more: Any) -> Any:
    """A random model of it, with its own attention, in fp32. `more`: of its text config."""
    config = wrapper_config(kind, vocab_size, **more)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, CLASSES[kind])(config)
        for parameter in model.parameters():  # what starts at one or zero says nothing about a slip
            if parameter.dim() < 2:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval()


def text_of(model: Any) -> Any:
    """What runs on text alone: the whole model, or its language model where transformers' own forward asks for an image."""
    is_llama4 = type(model).__name__ == "Llama4ForConditionalGeneration"
    return model.language_model if is_llama4 else model


def save_wrapper(model: Any, folder: Path) -> None:
    """The folder that a hub would hold, with the debug tokenizer."""
    model.save_pretrained(folder)
    debug_model("Llama")[1].save_pretrained(folder)
