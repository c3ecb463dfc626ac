"""Convert a GGUF file into a folder in hub layout (config.json, model.safetensors, tokenizer), once, in the cache.

The weights are dequantised by `gguf` and stored in fp32, so that later loads read plain safetensors.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from align.common.errors import UserError, nearest
from align.common.files import sha256_file
from align.common.hub import cache_folder
from align.target.names import check_values

_KEYS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# llama.cpp stores Llama's q and k rows in interleaved rotary order; Qwen's are left alone.
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
}
_DIGITS_ALONE = {"smollm"}
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""GGUF's types of numbers, and their bytes."""
_STRING, _ARRAY = 8, 9


def converted_folder(path: Path) -> Path:
    """The hub-layout folder made from the GGUF at `path`; converted at the first call, reused afterwards.

    Raises:
        UserError: not a GGUF file, or an architecture or tokenizer that is not supported.
    """
    destination = cache_folder() / "targets" / f"{path.stem}-{sha256_file(path)[:12]}"
    if (destination / "config.json").is_file():
        return destination
    import gguf

    try:
        _check_arrays(path)
        reader = gguf.GGUFReader(str(path))
    except UserError:
        raise
    except Exception as error:  # the reader raises whatever the bytes lead it to
        raise UserError(f"{path}: not a readable GGUF file ({type(error).__name__}: {error})") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = str(fields.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise UserError(
            f"{path}: GGUF architecture {architecture!r} is not supported{nearest(architecture, _ARCHITECTURES)}"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=destination.parent))
    try:
        config = _config(fields, architecture)
        names = {key: f"{architecture}.{name}" for key, name in _SIZES.items()}
        check_values(config, path.stat().st_size, str(path), names)
        weights = _weights(reader, config, permuted=_ARCHITECTURES[architecture][1])
        config["tie_word_embeddings"] = "lm_head.weight" not in weights
        config["vocab_size"] = weights["model.embed_tokens.weight"].shape[0]
        save_file(weights, str(part / "model.safetensors"), metadata={"format": "pt"})
        _tokenizer(fields, path).save_pretrained(str(part))
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        try:
            os.replace(part, destination)
        except OSError:  # another process was faster
            if not (destination / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return destination


def _check_arrays(path: Path) -> None:
    """Raises UserError where an array of the header has more values than the file has bytes: the reader would go on for ever.
    A header that ends too soon, or is none, says so there."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        order = ">" if struct.unpack_from("<I", data, 4)[0] & 0xFFFF == 0 else "<"

        def number(at: int, form: str) -> int:
            return int(struct.unpack_from(order + form, data, at)[0])

        def end_of(at: int, kind: int) -> int:
            if kind in _SCALARS:
                return at + _SCALARS[kind]
            if kind == _STRING:
                return at + 8 + number(at, "Q")
            if kind != _ARRAY:
                raise ValueError(f"unknown type {kind}")
            inner, count = number(at, "I"), number(at + 4, "Q")
            at += 12
            if count * _SCALARS.get(inner, 8) > len(data) - at:
                raise UserError(f"{path}: not a readable GGUF file (an array of {count} values)")
            if inner in _SCALARS:
                return at + count * _SCALARS[inner]
            for _ in range(count):
                at = end_of(at, inner)
            return at

        at = 24
        for _ in range(number(16, "Q")):
            at += 8 + number(at, "Q")
            at = end_of(at + 4, number(at, "I"))


def _config(fields: dict[str, Any], architecture: str) -> dict[str, Any]:
    def get(name: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{name}", default)

    heads, width = int(get("attention.head_count")), int(get("embedding_length"))
    theta = float(get("rope.freq_base", 10000.0))
    return {
        "architectures": [_ARCHITECTURES[architecture][0]],
        "model_type": architecture,
        "hidden_size": width,
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": int(get("attention.key_length", width // heads)),
        "intermediate_size": int(get("feed_forward_length")),
        "max_position_embeddings": int(get("context_length")),
        # GGUF keeps fp32; the shortest decimal that rounds to it is the published value
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon", 1e-5)))),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _weights(reader: Any, config: dict[str, Any], permuted: bool) -> dict[str, torch.Tensor]:
    import gguf

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name, kind = tensor.name.rsplit(".", 1)
        array = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if name.startswith("blk."):
            _, layer, part = name.split(".", 2)
            if part not in _KEYS:
                raise UserError(f"GGUF tensor {tensor.name!r} has no place in this architecture")
            if permuted and part in heads:
                array = _unpermute(array, heads[part])
            weights[f"model.layers.{layer}.{_KEYS[part]}.{kind}"] = array.contiguous()
        elif name in _TOP:
            weights[f"{_TOP[name]}.{kind}"] = array.contiguous()
        elif name != "rope_freqs":
            raise UserError(f"GGUF tensor {tensor.name!r} has no place in this architecture")
    return weights


def _unpermute(array: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleaved rotary order back to the half-split order of the hub's Llama."""
    rows = array.shape[0] // heads // 2
    return array.reshape(heads, rows, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _tokenizer(fields: dict[str, Any], path: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise UserError(
            f"{path}: GGUF tokenizer {fields.get('tokenizer.ggml.model')!r} is not supported (one of: gpt2)"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if fields.get("tokenizer.ggml.pre") in _DIGITS_ALONE:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])

    def token(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[int(index)]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token("bos"),
        eos_token=token("eos"),
        pad_token=token("padding"),
        unk_token=token("unknown"),
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
