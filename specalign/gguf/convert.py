"""Converts a GGUF file into a hub-layout folder in the cache, once, with transformers' reader."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specalign.common.checksums import is_unchanged, write_checksums
from specalign.common.errors import UserError
from specalign.common.files import UNFINISHED, naming, replacing, sha256_file
from specalign.common.hub import cache_folder
from specalign.common.schema import JsonObject
from specalign.common.text import say
from specalign.gguf.header import (
    EMBEDDING,
    HINT,
    ROPE_FACTORS,
    Header,
    check_header,
    read_header,
    rope_scale,
)
from specalign.gguf.tokenizer import answer_ends, complete_tokenizer, make_tokenizer, special_id

_VERSION = 7
"""Of the conversion; folders of other versions are not reused."""
_OWN_TOKENIZERS = ("llama", "qwen2", "qwen3")
_VALUES = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_positions": "context_length",
}
"""Config attributes and the GGUF keys that set them; 0 means none."""
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by hidden_size / heads instead of head_dim."""


def converted_folder(path: Path) -> Path:
    """The hub-layout folder of a GGUF file: converted at the first call, then reused while
    unchanged. Raises UserError: the file cannot be converted."""
    name = path.stem if path.suffix.lower() == ".gguf" else path.name
    folder = cache_folder() / "targets" / f"{name[:100]}-{sha256_file(path)[:12]}-{_VERSION}"
    if is_unchanged(folder):
        return folder
    header = read_header(path)
    check_header(path, header)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if is_unchanged(folder):  # converted by another process meanwhile
            return folder
        with replacing(folder, Path(f"{folder}{UNFINISHED}")) as new:
            _convert(path, header, new)
            write_checksums(new, "*")
    return folder


def _convert(path: Path, header: Header, folder: Path) -> None:
    say(f"converting {path.name} ({header.architecture}) once; this can take minutes", error=True)
    with tempfile.TemporaryDirectory(prefix="specalign-gguf-") as room:
        Path(room, "model.gguf").symlink_to(path.absolute())  # the name may have no suffix
        config = AutoConfig.from_pretrained(room, gguf_file="model.gguf")
        complete_config(path, header, config)
        model, tensors = _load_model(path, header, config, room)
        if header.architecture in _OWN_TOKENIZERS:
            tokenizer: Any = make_tokenizer(header.values)
        else:
            tokenizer = AutoTokenizer.from_pretrained(room, gguf_file="model.gguf")
            complete_tokenizer(tokenizer, header.values)
    with naming(folder):
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save_pretrained(str(folder))
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(str(folder))
    ends = answer_ends(header.values)
    if set(ends) - {config.eos_token_id}:
        pad = special_id(header.values, "padding")
        generation = {
            "eos_token_id": ends,
            "bos_token_id": config.bos_token_id,
            "pad_token_id": pad,
        }
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _load_model(
    path: Path, header: Header, config: Any, room: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model in float32, and its tensors without tied copies. Raises UserError: the file lacks
    tensors of the model, or has others that would be dropped."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        room, gguf_file="model.gguf", config=config, dtype=torch.float32,
        output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    model, report = loaded
    tensors: dict[str, torch.Tensor] = {}
    pointers = set[int]()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in pointers:
            tensors[name] = tensor.contiguous()
            pointers.add(tensor.data_ptr())
    architecture = header.architecture
    differing = [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])]
    if differing:
        raise UserError(
            f"{path}: lacks {min(differing)!r} of a {architecture} model, or has it in another "
            f"shape; {HINT}"
        )
    stored = sum(
        tensor.n_elements
        for name, tensor in header.tensors.items()
        if not name.startswith("rope_") and not _is_draft_layer(name, config.num_hidden_layers)
    )
    built = sum(tensor.numel() for tensor in tensors.values())
    if stored != built:
        raise UserError(
            f"{path}: contains {stored:,} weights, but the {architecture} model built from it has "
            f"{built:,}; {HINT}"
        )
    return model, tensors


def _is_draft_layer(name: str, layers: int) -> bool:
    """Layers after the model's last one are for multi-token prediction (Qwen3.5)."""
    return name.startswith("blk.") and int(name.split(".")[1]) >= layers


# ---- config ----
# transformers' reader knows a few keys of each architecture and silently leaves the class's default
# for the others: Gemma 2's soft caps, Gemma 3's rotary scale, StarCoder 2's window, Phi-4-mini's
# partial rotary width. The meaning of the keys is llama.cpp's.


def complete_config(path: Path, header: Header, config: Any) -> None:
    """Write what the file says into the config, before the model is built.

    Raises:
        UserError: a partial rotary width that this architecture's config cannot express.
    """
    config.vocab_size = int(header.tensors[EMBEDDING].shape[1])
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        setattr(config, f"{name}_token_id", special_id(header.values, key))
    for attribute, key in _VALUES.items():
        value = header.get(key)
        if value and hasattr(config, attribute):
            setattr(config, attribute, _shortest_decimal(value))
    head_dim = _head_dim(header)
    if head_dim and "head_dim" in vars(config):  # not where it is a property
        config.head_dim = head_dim
    if hasattr(config, "query_pre_attn_scalar"):
        largest = config.num_hidden_layers == _LARGEST.get(header.architecture)
        per_head = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = per_head if largest else config.head_dim
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        _complete_rope(path, header, rope, config.max_position_embeddings)


def _shortest_decimal(value: Any) -> Any:
    """Files store float32; the shortest decimal that rounds to it is the published value."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _head_dim(header: Header) -> int | None:
    heads = header.get("attention.head_count")
    if header.get("attention.key_length"):
        return int(header.get("attention.key_length"))
    return header.get("embedding_length") // heads if isinstance(heads, int) and heads else None


def _complete_rope(path: Path, header: Header, rope: JsonObject, context: int) -> None:
    by_layer_type = any(isinstance(group, dict) for group in rope.values())
    main = rope["full_attention"] if by_layer_type else rope
    base = header.get("rope.freq_base")
    if base:
        main["rope_theta"] = float(base)
    sliding_base = header.get("rope.freq_base_swa")
    if by_layer_type and sliding_base:
        rope["sliding_attention"]["rope_theta"] = float(sliding_base)
    factor = rope_scale(header)
    stored = header.tensors.get(ROPE_FACTORS)
    if stored is not None:  # Llama 3.1's; a longrope that is the same at every length
        per_frequency = (stored.data * np.float32(factor)).tolist()
        main |= {
            "rope_type": "longrope", "short_factor": per_frequency, "long_factor": per_frequency,
            "attention_factor": 1.0, "original_max_position_embeddings": context,
        }  # fmt: skip
    elif factor != 1:
        main |= {"rope_type": "linear", "factor": factor}
    width = header.get("rope.dimension_count")
    head_dim = _head_dim(header)
    if by_layer_type or not width or not head_dim:
        return
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = width / head_dim
    elif width != head_dim:
        key = header.key("rope.dimension_count")
        raise UserError(f"{path}: {key}={width}: partial rotary width of {head_dim}; {HINT}")
