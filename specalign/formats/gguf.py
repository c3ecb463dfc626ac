"""DFlash drafters as GGUF files for llama.cpp (architecture `dflash`), read and written: DFlash's
config and tensors under GGUF's names.

The vocabulary is copied from the target's own GGUF file: llama.cpp compares both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
from torch import Tensor

from specalign.common.errors import UserError, in_one_line
from specalign.formats.block import import_drafter
from specalign.formats.dflash import make_dflash
from specalign.formats.published import Exported
from specalign.formats.tensors import EMBEDDING
from specalign.gguf.header import read_header
from specalign.lm.inspection.keys import RotaryTable
from specalign.lm.inspection.parts import embedding_scale
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

ARCHITECTURE = "dflash"
FILE = "drafter.gguf"
_FREQUENCIES = "rope_freqs.weight"
_TOP = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip
"""Published name → GGUF's, outside of the layers."""
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""`layers.3.self_attn.q_proj.weight` → `blk.3.attn_q.weight`."""
_SETTINGS = {
    "embedding_length": ("hidden_size", "uint32"),
    "feed_forward_length": ("intermediate_size", "uint32"),
    "block_count": ("num_hidden_layers", "uint32"),
    "attention.head_count": ("num_attention_heads", "uint32"),
    "attention.head_count_kv": ("num_key_value_heads", "uint32"),
    "attention.key_length": ("head_dim", "uint32"),
    "attention.value_length": ("head_dim", "uint32"),
    "rope.dimension_count": ("head_dim", "uint32"),
    "context_length": ("max_position_embeddings", "uint32"),
    "vocab_size": ("vocab_size", "uint32"),
    "block_size": ("block_size", "uint32"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "float32"),
    "rope.freq_base": ("rope_theta", "float32"),
    "attention.causal": ("is_causal", "bool"),
}
"""GGUF key → config key, type."""
_LAYERS = f"{ARCHITECTURE}.target_layers"
_SCALE = f"{ARCHITECTURE}.embedding_scale"
_ACTIVATION = f"{ARCHITECTURE}.hidden_activation"
_MASK = "tokenizer.ggml.mask_token_id"
_STORED = {torch.bfloat16: GGMLQuantizationType.BF16, torch.float16: GGMLQuantizationType.F16}


def make_gguf(drafter: BlockDrafter) -> Exported:
    """What the file holds, still under DFlash's names; `d2t` holds token ids. Raises UserError for a
    drafter that llama.cpp's architecture can't hold."""
    made = make_dflash(drafter, "gguf", biases=False, adds_bias=False)
    if made.config["hidden_act"] not in ("silu", "gelu", "gelu_pytorch_tanh"):
        kind = made.config["hidden_act"]
        raise UserError(f"--format gguf: llama.cpp has silu and gelu, the drafter {kind}")
    factors = _frequency_factors(drafter, made.config["rope_theta"])
    if factors is not None:
        made.tensors[_FREQUENCIES] = factors
    if drafter.draft_vocab is not None:
        made.tensors["d2t"] = drafter.draft_vocab
    if made.tensors.pop(EMBEDDING, None) is not None:  # llama.cpp has a key for the scale
        made.config["dflash_config"] = {"input_embedding_scale": embedding_scale(drafter.target)}
    return made


def _frequency_factors(drafter: BlockDrafter, theta: float) -> Tensor | None:
    """By how much each pair of a head turns more slowly than by the base `theta`, (d / 2); None =
    none does."""
    c = drafter.config
    plain = theta ** -(torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    module = drafter.target.body.rotary_emb
    if c.rotaries:
        kind, scale = "yarn", c.rotaries[0].scale
        frequencies = torch.tensor(c.rotaries[0].inv_freq, dtype=torch.float64)
    else:
        kind = str(getattr(module, "rope_type", "default"))
        scale = float(getattr(module, "attention_scaling", 1.0))
        if kind == "default":
            return None
        frequencies = module.inv_freq.double().cpu()
    if scale != 1 or kind in ("dynamic", "longrope"):
        why = "the format holds fixed frequencies without a scale"
        raise UserError(f"--format gguf: rope_type={kind}: {why}")
    factors = plain / frequencies
    return None if bool(((factors - 1).abs() < 1e-4).all()) else factors.float()


def check_vocabulary(made: Exported, vocabulary: Path | None) -> None:
    """Raises UserError if the target's GGUF file is missing or another model's."""
    if vocabulary is None:
        raise UserError("--format gguf takes the target's vocabulary: name --target-gguf FILE")
    with in_one_line(f"--target-gguf={vocabulary}: can't be read"):
        count = len(_read_vocabulary(vocabulary)["tokenizer.ggml.tokens"][0])
    wanted = f"the drafter's target has {made.config['vocab_size']}"
    if count != made.config["vocab_size"]:
        raise UserError(f"--target-gguf={vocabulary}: has {count} tokens, {wanted}")


# ---- the file ----


def write_gguf(
    folder: Path, made: Exported, name: str, dtype: torch.dtype, vocabulary: Path
) -> None:
    """Matrices in the requested type, vectors in fp32."""
    config = made.config
    writer = GGUFWriter(folder / FILE, ARCHITECTURE)
    writer.add_name(name)
    for key, (source, kind) in _SETTINGS.items():
        getattr(writer, f"add_{kind}")(f"{ARCHITECTURE}.{key}", config[source])
    writer.add_array(_LAYERS, [i + 1 for i in config["target_layer_ids"]])  # hidden_states[i + 1]
    scale = config.get("dflash_config", {}).get("input_embedding_scale")
    if scale is not None:
        writer.add_float32(_SCALE, float(scale))
    if config["hidden_act"] != "silu":
        writer.add_string(_ACTIVATION, config["hidden_act"])
    for key, (value, value_type, entry_type) in _read_vocabulary(vocabulary).items():
        writer.add_key_value(key, value, value_type, entry_type)
    writer.add_uint32(_MASK, int(config["mask_token_id"]))
    names = _gguf_names(config["num_hidden_layers"])
    for key, tensor in made.tensors.items():
        _add_tensor(writer, names.get(key, key), tensor.detach().cpu(), dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: GGUFWriter, name: str, data: Tensor, dtype: torch.dtype) -> None:
    if not data.is_floating_point():
        writer.add_tensor(name, np.ascontiguousarray(data.to(torch.int64).numpy()))
        return
    rows, stored = np.ascontiguousarray(data.float().numpy()), _STORED.get(dtype)
    if data.dim() < 2 or stored is None:
        writer.add_tensor(name, rows)
    else:
        writer.add_tensor(name, quants.quantize(rows, stored), raw_dtype=stored)


def read_gguf(folder: Path) -> Exported:
    """Under DFlash's names, as llama.cpp defines the keys. Raises UserError."""
    with in_one_line(f"{folder / FILE}: can't be read"):
        read_header(folder / FILE)
        file = GGUFReader(folder / FILE)
        values = {k: f.contents() for k, f in file.fields.items() if "tokens" not in k}
        keys = {source: f"{ARCHITECTURE}.{key}" for key, (source, _) in _SETTINGS.items()}
        config = {source: values[key] for source, key in keys.items()}
        config["target_layer_ids"] = [i - 1 for i in values[_LAYERS]]
        config["mask_token_id"] = values[_MASK]
        names = {name: ours for ours, name in _gguf_names(config["num_hidden_layers"]).items()}
        tensors = {names.get(t.name, t.name): _to_torch(t) for t in file.tensors}
    config["hidden_act"] = values.get(_ACTIVATION, "silu")
    if _SCALE in values:
        config["dflash_config"] = {"input_embedding_scale": values[_SCALE]}
    return Exported(config, tensors)


def restore_gguf(held: Exported, folder: Path, target: Target) -> BlockDrafter:
    """A drafter out of what a file holds. Raises UserError."""
    tensors, config = dict(held.tensors), held.config
    factors, rotary = tensors.pop(_FREQUENCIES, None), None
    if factors is not None:
        steps = torch.arange(len(factors), dtype=torch.float64) / len(factors)
        table = config["rope_theta"] ** -steps / factors.double()
        rotary = [RotaryTable("half", 0, tuple(table.tolist())).entry()]
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    return import_drafter(config, tensors, "dflash", folder, target, rotary)


def _to_torch(tensor: Any) -> Tensor:
    """A tensor of the file in the type that it is stored in."""
    shape = [int(n) for n in reversed(tensor.shape)]
    data = np.array(tensor.data)
    if tensor.tensor_type == GGMLQuantizationType.BF16:
        return torch.from_numpy(data.view(np.int16).reshape(shape)).view(torch.bfloat16)
    return torch.from_numpy(data.reshape(shape))


def _gguf_names(layers: int) -> dict[str, str]:
    """Published names of tensors → GGUF's."""
    names = dict(_TOP)
    for i in range(layers):
        names |= {f"layers.{i}.{o}.weight": f"blk.{i}.{t}.weight" for o, t in _LAYER.items()}
    return names


def _read_vocabulary(path: Path) -> dict[str, tuple[Any, Any, Any]]:
    """The tokenizer's keys of a GGUF file → value, its type, and the type of an array's entries."""
    read_header(path)  # GGUFReader would follow an array of any length
    found: dict[str, tuple[Any, Any, Any]] = {}
    for key, field in GGUFReader(path).fields.items():
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
            array = field.types[0] == GGUFValueType.ARRAY
            found[key] = field.contents(), field.types[0], field.types[-1] if array else None
    if not isinstance(found.get("tokenizer.ggml.tokens", (None,))[0], list):
        raise ValueError("it has no vocabulary")
    return found
