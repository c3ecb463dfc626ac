"""Convert a GGUF file into a folder in hub layout (config.json, model.safetensors, tokenizer), once, in the cache.

The weights are dequantised by `gguf` and stored in fp32, so that later loads read plain safetensors. What our own converter does
not know goes through transformers' reader.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from align.common.checksums import unchanged, write_checksums
from align.common.claims import scratch
from align.common.errors import UserError
from align.common.files import UNFINISHED, naming, sha256_file, to_disk
from align.common.hub import cache_folder
from align.common.text import say
from align.gguf.header import OWN, Header
from align.gguf.parts import join_parts, part_paths
from align.gguf.positions import FREQUENCIES, scale, take_positions
from align.gguf.settings import check_whole, published, take_settings, take_sizes
from align.gguf.tokenizer import adds_bos, answer_ends, chat_templates, make_tokenizer, mark_ends, special_id

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
_PERMUTED = {"llama"}
_CLASSES = dict(zip(OWN, ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), strict=True))
_VERSION = 6
"""Of what is made of a file; a copy of another version is not used."""
_DEAD_AFTER = 24 * 3600.0
"""Seconds."""


def converted_folder(path: Path, check: Callable[[Path], Header]) -> Path:
    """The hub-layout folder made from the GGUF at `path`, which may be any part of a split file. It is converted at the first call and
    reused as long as its files are what was written. `check`: reads and checks the header of a file that is to be converted.

    Raises:
        UserError: what no reader can make a model of, or a tokenizer that is not supported.
    """
    parts = part_paths(path)
    name = path.stem if path.suffix.lower() == ".gguf" else path.name  # a blob's name may have dots
    destination = cache_folder() / "targets" / f"{name[:100]}-{_digest(parts)[:12]}-{_VERSION}"
    if unchanged(destination):
        return destination
    header = check(path)
    destination.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(destination.parent)
    if destination.exists():
        say(f"{destination}: is not what was converted from {path.name}; converting it again", error=True)
        _remove(destination)
    part = Path(tempfile.mkdtemp(dir=destination.parent, suffix=UNFINISHED))
    try:
        convert = _convert if header.architecture in OWN else _convert_by_transformers
        if len(parts) == 1:
            convert(path, header, part)
        else:
            with tempfile.TemporaryDirectory(dir=destination.parent, suffix=UNFINISHED) as room:
                whole = Path(room) / path.name
                with naming(whole):
                    join_parts(parts, whole)
                convert(whole, header, part)
        write_checksums(part, "*")
        for file in (*(p for p in part.rglob("*") if p.is_file()), part):
            to_disk(file)
        try:
            os.replace(part, destination)
            to_disk(destination.parent)
        except OSError:  # another process was faster
            if not unchanged(destination):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return destination


def _digest(parts: Sequence[Path]) -> str:
    """sha256 (hex) of a file; of several, that of theirs."""
    digests = [sha256_file(part) for part in parts]
    return digests[0] if len(parts) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _remove(folder: Path) -> None:
    """Remove a folder that others may be reading: under another name, so that nobody finds half of it."""
    away = Path(tempfile.mkdtemp(dir=folder.parent, suffix=UNFINISHED))
    with suppress(FileNotFoundError):  # another process was faster
        os.replace(folder, away / folder.name)
    shutil.rmtree(away, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed conversions left. Others may be at work, so a part counts as one after a day without a change."""
    for part in folder.glob(f"*{UNFINISHED}"):
        with suppress(FileNotFoundError):
            if time.time() - max(p.stat().st_mtime for p in (part, *part.rglob("*"))) > _DEAD_AFTER:
                shutil.rmtree(part, ignore_errors=True)


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """The file's reader and its metadata, arrays included."""
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader raises whatever the bytes lead it to
        raise UserError(f"{path}: not a readable GGUF file ({type(error).__name__}: {error})") from None


def _write_ends(fields: dict[str, Any], folder: Path) -> None:
    """Write a generation_config.json if more tokens than the file's eos end an answer."""
    ends = answer_ends(fields)
    if {*ends} - {special_id(fields, "eos")}:
        ids = {
            f"{name}_token_id": special_id(fields, key) for name, key in (("bos", "bos"), ("pad", "padding"))
        }
        text = json.dumps({"eos_token_id": ends, **ids}, indent=2)
        (folder / "generation_config.json").write_text(f"{text}\n")


def _convert(path: Path, header: Header, part: Path) -> None:
    reader, fields = _read(path)
    config = _config(fields, header.architecture)
    weights = _weights(reader, config, permuted=header.architecture in _PERMUTED)
    _scale_positions(config, weights.pop(FREQUENCIES, None), scale(header))
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    config["vocab_size"] = weights["model.embed_tokens.weight"].shape[0]
    with naming(part):
        save_file(weights, str(part / "model.safetensors"), metadata={"format": "pt"})
    make_tokenizer(fields, path).save_pretrained(str(part))
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_ends(fields, part)


def _convert_by_transformers(path: Path, header: Header, part: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    say(
        f"converting {path.name} ({header.architecture}; {type_names(header)}) once; a vocabulary of 262k tokens takes minutes",
        error=True,
    )
    with scratch("specalign-gguf-") as alone:  # where no other file can be taken for one of its own
        file = "model.gguf"  # a blob's name has no ending
        (alone / file).symlink_to(path.absolute())
        config = AutoConfig.from_pretrained(alone, gguf_file=file)
        take_sizes(header, config)
        asked = {"config": config, "dtype": torch.float32, "output_loading_info": True}
        asked["ignore_mismatched_sizes"] = True  # they are said in a line
        pair: Any = AutoModelForCausalLM.from_pretrained(alone, gguf_file=file, **asked)
        tokenizer: Any = AutoTokenizer.from_pretrained(alone, gguf_file=file)
    (model, found), tensors, seen = pair, {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a head that is the embedding is stored once
            tensors[name] = tensor.contiguous()
        seen.add(tensor.data_ptr())
    config = model.config
    others = sorted(key[0] for key in found["mismatched_keys"])
    check_whole(path, header, sorted(found["missing_keys"]), others, tensors, config.num_hidden_layers)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    take_positions(path, header, config)
    take_settings(header, config)
    with naming(part):
        save_file(tensors, str(part / "model.safetensors"), metadata={"format": "pt"})
    _, fields = _read(path)
    mark_ends(tokenizer, fields)
    tokenizer.chat_template = chat_templates(fields)
    if tokenizer.add_bos_token != adds_bos(fields):
        tokenizer.add_bos_token = adds_bos(fields)
    tokenizer.save_pretrained(str(part))
    config.save_pretrained(str(part))
    _write_ends(fields, part)


def type_names(header: Header) -> str:
    """Which types its tensors are stored in, the most frequent first: `Q4_K × 108, F32 × 72`."""
    import gguf

    def name(number: int) -> str:
        try:
            return gguf.GGMLQuantizationType(number).name
        except ValueError:
            return f"type {number}"

    counts = sorted(header.types.items(), key=lambda item: -item[1])
    return ", ".join(f"{name(number)} × {count}" for number, count in counts)


def _config(fields: dict[str, Any], architecture: str) -> dict[str, Any]:
    def get(name: str, default: Any = None) -> Any:
        return fields.get(f"{architecture}.{name}", default)

    heads, width = int(get("attention.head_count")), int(get("embedding_length"))
    theta = float(get("rope.freq_base", 10000.0))
    return {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "hidden_size": width,
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": int(get("attention.key_length", width // heads)),
        "intermediate_size": int(get("feed_forward_length")),
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": published(float(get("attention.layer_norm_rms_epsilon", 1e-5))),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": special_id(fields, "bos"),
        "eos_token_id": special_id(fields, "eos"),
        "pad_token_id": special_id(fields, "padding"),
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
        elif tensor.name == FREQUENCIES:
            weights[FREQUENCIES] = array
        else:
            raise UserError(f"GGUF tensor {tensor.name!r} has no place in this architecture")
    return weights


def _scale_positions(config: dict[str, Any], factors: torch.Tensor | None, factor: float) -> None:
    """Positions divided by a factor; and frequencies by factors of their own, as Llama 3.1's are: in transformers' words a longrope that is
    the same at every length."""
    rope = config["rope_parameters"]
    if factors is None or bool((factors == 1).all()):
        if factor != 1:
            rope |= {"rope_type": "linear", "factor": factor}
        return
    of_each = (factors * factor).tolist()
    rope |= {
        "rope_type": "longrope",
        "short_factor": of_each,
        "long_factor": of_each,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _unpermute(array: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleaved rotary order back to the half-split order of the hub's Llama."""
    rows = array.shape[0] // heads // 2
    return array.reshape(heads, rows, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
