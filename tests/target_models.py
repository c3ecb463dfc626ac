"""Tiny random models of transformers' architectures, as targets: 4 layers of width 64 over a small vocabulary."""

import copy
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from specalign.lm.debug import debug_model
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target

WINDOW = 24
"""Tokens that a sliding layer sees; texts in tests are longer."""

COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "sliding_window": WINDOW, "attention_chunk_size": WINDOW,
    "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    "attention_dropout": 0.0, "use_sliding_window": True, "max_window_layers": 1, "sliding_window_pattern": 2,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_num_experts": 4,
    "moe_k": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "num_experts_per_token": 2,
    # low-rank keys and values
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 12,
    "qk_head_dim": 32,
    # recurrent states
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_d_ssm": 128, "state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8,
    "block_size": 4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "laurel_rank": 8,
    "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0, "logit_scale": 0.25,
    "logits_scaling": 4.0, "init_std": 0.15,
}  # fmt: skip
"""What a config gets where it has a key of that name."""
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 24},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 512},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "falcon_alibi": {"new_decoder_architecture": False, "multi_query": False, "alibi": True},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96, "conv_L_cache": 3},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {"vocab_size_per_layer_input": 260, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0], "interleave_moe_layer_step": 2},
    **dict.fromkeys(
        ("axk1", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"),
        {"num_key_value_heads": 4},
    ),
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"),
        {"num_key_value_heads": 4, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16},
    ),
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 3,
    },
    **dict.fromkeys(
        ("bailing_hybrid", "kimi_linear"),
        {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4},
    ),
    "dots3_note_text": {
        "layer_types": ["sliding_attention", "indexed_attention"] * 2, "shared_experts_intermediate_size": 32, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 16, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 12, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 16,
    },
    "git": {"vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 4, "num_hidden_layers": 8, "num_key_value_heads": 4},
    **dict.fromkeys(("bert", "bert-generation"), {"is_decoder": True}),
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "xglm": {"ffn_dim": 96},
    **dict.fromkeys(("deepseek_v2", "sarvam_mla"), {"num_key_value_heads": 4, "first_k_dense_replace": 4}),
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": 1e4} for k in ("sliding_attention", "full_attention")},
    },
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 512, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 260, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba": {"intermediate_size": 96, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "attention_head_dim": 32, "attention_hidden_size": 128},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 8, "head_dim": 32},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), {"unpadded_vocab_size": 260, "eos_token_id": 2}),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "whisper"),
        {"decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "d_model": 64, "max_target_positions": 512, "forced_eos_token_id": None},
    ),
    "inkling_text": {"unpadded_vocab_size": 250},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 32, "first_k_dense_replace": 1},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 16, "indexer_compress_ratio": 4, "hc_lowrank": 8,
    },
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
}  # fmt: skip
"""By architecture, what it needs beside."""
IS_OLD = Version(transformers.__version__) < Version("5.24")
needs_recent = pytest.mark.skipif(IS_OLD, reason="transformers before 5.24 behaves differently")
KINDS = {"falcon_alibi": "falcon", "musicgen": "musicgen_decoder"}
"""Second variants of an architecture, by its model_type; of a whole its causal language model's."""
_NEEDED = ("head_dim", "num_key_value_heads")


def _takes(config: Any, key: str) -> bool:
    """Whether it is a field, with a value, and no property."""
    fields = {*getattr(type(config), "__dataclass_fields__", {}), *type(config).attribute_map}
    try:
        return key in fields and (getattr(config, key) is not None or key in _NEEDED)
    except (AttributeError, ValueError, RuntimeError):  # one that varies by layer
        return False


def tiny_config(name: str, vocab_size: int, **own: Any) -> Any:
    """A small config of the architecture `name`; `own`: further values of it."""
    kind = KINDS.get(name, name)
    if IS_OLD and kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} lacks {kind}")
    made = transformers.AutoConfig.for_model(kind)
    text = made.get_text_config(decoder=True)
    given = {key: value for key, value in COMMON.items() if _takes(text, key)}
    given |= {"vocab_size": vocab_size, **OWN.get(name, {}), **own}
    if type(text) is type(made):  # of an encoder and a decoder it is a copy
        return transformers.AutoConfig.for_model(kind, **given)
    whole = copy.deepcopy(made)
    key = next(k for k in whole.sub_configs if getattr(made, k) is text)
    setattr(whole, key, type(text)(**given))
    return whole


def tiny_model(name: str, vocab_size: int, seed: int = 0, **own: Any) -> Any:
    """A random model of it, with its own attention, in fp32."""
    config = tiny_config(name, vocab_size, **own)
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    architecture = names[name] if name in names else names[KINDS[name]]
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
        with torch.no_grad():  # what starts at one or zero says nothing about a slip
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval()


def tiny_target(name: str, tokenizer: Any = None, seed: int = 0, **own: Any) -> Target:
    """The architecture as a proved target. Raises UserError where it is refused."""
    tokenizer = debug_model("Llama")[1] if tokenizer is None else tokenizer
    return prove_target(tiny_model(name, len(tokenizer), seed, **own), tokenizer, ModelSource(name))


def generated(own: Any, target: Target, tokens: list[int], new: int) -> list[int]:
    """What transformers' `generate` writes, by the model that we do not touch."""
    given, ends = torch.tensor([tokens]), list(target.eos_ids)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": ends, "pad_token_id": 2}
    mask = torch.ones_like(given)
    out = own.generate(given, attention_mask=mask, max_new_tokens=new, **options)
    return out[0, len(tokens) :].tolist()


def some_text(target: Target, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens, (1, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, target.vocab_size, (1, length), generator=generator)


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The hub's half-split rotary rows as llama.cpp stores them."""
    return weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def add_byte_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    """The debug tokenizer, with a merge in place of <unused>: a GGUF file has one."""
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens[3] = "ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


PIECES = [*"▁abehlot", "▁▁", "he", "the", "▁the", "ll", "hell", "hello", "▁▁▁▁", "ab"]


def piece_fields() -> dict[str, Any]:
    """A SentencePiece vocabulary as a GGUF file holds it: bytes and pieces, the later the worse."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + PIECES
    letters = 8
    order = [-float(i) for i in range(letters, len(PIECES))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *pieces, "<think>", "<pad>"],
        "tokenizer.ggml.scores": [0.0] * 259 + [-1000.0] * letters + [*order, 0.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4, 3],
    }


def add_piece_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A tokenizer of that vocabulary."""
    fields = piece_fields()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_scores(fields["tokenizer.ggml.scores"])
    writer.add_token_types(fields["tokenizer.ggml.token_type"])


def tensor_names(architecture: str, layers: int) -> gguf.TensorNameMap:
    """llama.cpp's names of an architecture's tensors."""
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, layers)


def write_out(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_target(target: Target, folder: Path) -> str:
    """The folder that a hub would hold."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return str(folder)


def asking_target(folder: Path, target: Target, **asks: Any) -> str:
    """The target in a folder whose generation config asks for this."""
    save_target(target, folder)
    given = json.loads((path := folder / "generation_config.json").read_text())
    path.write_text(json.dumps(given | asks))
    return str(folder)


def write_gguf(
    path: Path,
    target: Target,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    frequencies: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    """A target as a GGUF file. `tokenizer`: gpt2, or llama for `piece_fields`. `frequencies`: what
    those of its positions are divided by, each by its own; `scale`: all of them."""
    config = target.model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if scale is not None:
        writer.add_float32(f"{architecture}.rope.scale_linear", scale)
    if tokenizer == "llama":
        add_piece_tokenizer(writer)
    else:
        add_byte_tokenizer(writer, target.tokenizer)
    writer.add_chat_template(target.tokenizer.chat_template)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = tensor_names(
        architecture if architecture != "lama" else "llama", config.num_hidden_layers
    )
    for name, weight in target.model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part, _, kind = name.rpartition(".")
        stored = f"{names.get_name(part)}.{kind}"
        projection = part.rpartition(".")[2]
        if projection in heads and architecture == "llama":
            weight = _interleaved(weight, heads[projection])
        writer.add_tensor(stored, np.ascontiguousarray(weight.numpy()))
    if frequencies is not None:
        writer.add_tensor("rope_freqs.weight", frequencies.numpy())
    write_out(writer)


def save_with_flag(folder: Path, head: str, flag: bool) -> str:
    """The debug target in a folder: its head another one than its embedding, equal to it, or not stored; config.json says `flag`."""
    model, tokenizer = debug_model("Llama")
    model.config.tie_word_embeddings = False
    weight = model.get_input_embeddings().weight.detach().clone()
    model.lm_head.weight = torch.nn.Parameter(weight.flip(0) if head == "other" else weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path, weights = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": flag}))
    if head == "none":
        kept = {
            name: tensor for name, tensor in load_file(weights).items() if name != "lm_head.weight"
        }
        save_file(kept, weights, metadata={"format": "pt"})
    return str(folder)
