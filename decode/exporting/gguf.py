"""GGUF files for llama.cpp (architecture `dflash`; `--spec-type draft-dflash` or `draft-dspark`).

The tensors are DFlash's (arXiv 2602.06036) and DSpark's (arXiv 2607.05147) under GGUF's names. The
vocabulary is copied from the target's own GGUF file: llama.cpp compares both.
"""

from __future__ import annotations

from pathlib import Path
from shlex import join
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
from torch import Tensor
from torch.nn import functional as F

from decode.exporting import qwen3
from decode.exporting.base import Format
from decode.exporting.dflash import make_dflash
from decode.exporting.dspark import make_dspark
from decode.exporting.folder import EMBEDDING, Exported
from decode.exporting.serving import ServedTarget, Snippet
from specalign.common.errors import UserError, in_one_line
from specalign.formats.block import import_drafter
from specalign.gguf.header import read_header
from specalign.lm.inspection.parts import embedding_scale
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig

ARCHITECTURE = "dflash"
FILE = "drafter.gguf"
W1 = "markov_head.markov_w1.weight"
_CONFIDENCE = "confidence_head.proj.weight"
_FREQUENCIES = "rope_freqs.weight"
_TOP = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", W1: "markov_w1.weight", "markov_head.markov_w2.weight": "markov_w2.weight",
    _CONFIDENCE: "conf_proj.weight", "confidence_head.proj.bias": "conf_proj.bias",
}  # fmt: skip
"""Published name → GGUF's, outside of the layers."""
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""`layers.3.self_attn.q_proj.weight` → `blk.3.attn_q.weight`."""
_SETTINGS = (
    ("embedding_length", "hidden_size", "uint32"),
    ("feed_forward_length", "intermediate_size", "uint32"),
    ("block_count", "num_hidden_layers", "uint32"),
    ("attention.head_count", "num_attention_heads", "uint32"),
    ("attention.head_count_kv", "num_key_value_heads", "uint32"),
    ("attention.key_length", "head_dim", "uint32"),
    ("attention.value_length", "head_dim", "uint32"),
    ("rope.dimension_count", "head_dim", "uint32"),
    ("context_length", "max_position_embeddings", "uint32"),
    ("vocab_size", "vocab_size", "uint32"),
    ("block_size", "block_size", "uint32"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", "float32"),
    ("rope.freq_base", "rope_theta", "float32"),
    ("attention.causal", "is_causal", "bool"),
)
"""GGUF key, config key, type."""
_LAYERS = f"{ARCHITECTURE}.target_layers"
_SCALE = f"{ARCHITECTURE}.embedding_scale"
_ACTIVATION = f"{ARCHITECTURE}.hidden_activation"
_FROM_ANCHOR = f"{ARCHITECTURE}.sample_from_anchor"
_MASK = "tokenizer.ggml.mask_token_id"

# ---- content ----


def make_gguf(drafter: BlockDrafter) -> Exported:
    """What the file holds, still under DFlash's or DSpark's names; `d2t` holds token ids.

    Raises:
        UserError: a drafter that llama.cpp's architecture can't hold.
    """
    c = drafter.config
    qwen3.check_fits(drafter, "gguf", "", ("vanilla", "linear"), "vanilla or linear", biases=False)
    if c.hidden_act not in ("silu", "gelu", "gelu_pytorch_tanh"):
        raise UserError(
            f"--format gguf: llama.cpp's drafters have silu or gelu, this one has {c.hidden_act}"
        )
    plain = c.fill_in and drafter.markov is None
    made = make_dflash(drafter, "gguf") if plain else make_dspark(drafter, "gguf")
    tensors = made.tensors
    if _CONFIDENCE in tensors:  # llama.cpp always reads W1's columns
        missing = c.hidden_size + made.config["markov_rank"] - tensors[_CONFIDENCE].shape[1]
        tensors[_CONFIDENCE] = F.pad(tensors[_CONFIDENCE], (0, missing))
    factors = _frequency_factors(drafter, made.config["rope_theta"])
    if factors is not None:
        tensors[_FREQUENCIES] = factors
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] + torch.arange(
            len(tensors["d2t"]), device=tensors["d2t"].device
        )
    if tensors.pop(EMBEDDING, None) is not None:  # llama.cpp has a key for the scale
        made.config["dflash_config"] = {"input_embedding_scale": embedding_scale(drafter.target)}
    return made


def _frequency_factors(drafter: BlockDrafter, theta: float) -> Tensor | None:
    """By how much each pair of a head turns more slowly than by the base `theta`, (d / 2); None =
    none does."""
    c = drafter.config
    steps = torch.arange(0, c.head_dim, 2, dtype=torch.float64)
    plain = theta ** -(steps / c.head_dim)
    if c.rotaries:
        if c.rotaries[0].scale != 1:
            raise UserError(
                "--format gguf: YaRN scales attention, and this format holds frequencies only"
            )
        factors = plain / torch.tensor(c.rotaries[0].inv_freq, dtype=torch.float64)
        return None if bool(((factors - 1).abs() < 1e-4).all()) else factors.float()
    module = drafter.target.body.rotary_emb
    kind = str(getattr(module, "rope_type", "default"))
    if kind == "default":
        return None
    if kind in ("dynamic", "longrope") or float(getattr(module, "attention_scaling", 1.0)) != 1.0:
        raise UserError(
            f"--format gguf: rope_type={kind}: this format holds fixed frequencies only"
        )
    return (plain / module.inv_freq.double().cpu()).float()


def serve_gguf(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    options = [
        "--spec-type",
        spec_type(config),
        "--spec-draft-n-max",
        str(config.block_size),
        "--metrics",
    ]
    if target.context:
        options += ["-c", str(target.context)]
    line = join(["llama-server", "-m", target.gguf, "-md", f"{folder}/{FILE}", *options])
    return [Snippet("llama.cpp", "bash", (line,))]


def spec_type(config: BlockConfig) -> str:
    """llama.cpp's `--spec-type`; `draft-dflash` ignores the block layout in the file."""
    return "draft-dflash" if config.fill_in and not config.markov_rank else "draft-dspark"


# ---- the file ----


class GGUFFormat(Format):
    """One file: matrices in the requested type, vectors in fp32."""

    def check(self, made: Exported, vocabulary: Path | None) -> None:
        if vocabulary is None:
            raise UserError(
                "--format gguf: name the target's own GGUF file, whose vocabulary it takes: "
                "--target-gguf FILE"
            )
        if not vocabulary.is_file():
            raise UserError(f"--target-gguf={vocabulary}: no such file")
        with in_one_line(f"--target-gguf={vocabulary}: can't be read"):
            count = len(_read_vocabulary(vocabulary)["tokenizer.ggml.tokens"][0])
        wanted = made.config["vocab_size"]
        if count != wanted:
            raise UserError(
                f"--target-gguf={vocabulary}: has {count} tokens, the drafter's target has {wanted}"
            )

    def fill(
        self, part: Path, made: Exported, name: str, dtype: torch.dtype, vocabulary: Path | None
    ) -> None:
        assert vocabulary is not None
        writer = GGUFWriter(part / FILE, ARCHITECTURE)
        writer.add_name(name)
        _add_settings(writer, made.config)
        for key, (value, kind, sub) in _read_vocabulary(vocabulary).items():
            writer.add_key_value(key, value, kind, sub)
        writer.add_uint32(_MASK, int(made.config["mask_token_id"]))
        for tensor_name, tensor in made.tensors.items():
            _add_tensor(writer, to_gguf_name(tensor_name), tensor.detach().cpu(), dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def read(self, folder: Path) -> Exported:
        """Under DFlash's and DSpark's names, as llama.cpp defines the keys."""
        with in_one_line(f"{folder / FILE}: can't be read"):
            read_header(folder / FILE)
            file = GGUFReader(folder / FILE)
            words = {k: f.contents() for k, f in file.fields.items() if "tokens" not in k}
            tensors = {from_gguf_name(t.name): _to_torch(t) for t in file.tensors}
        return Exported(_read_settings(words, tensors, folder / FILE), tensors)

    def settings_in_file(self, made: Exported, held: Exported) -> dict[str, Any]:
        return {key: value for key, value in made.config.items() if key in held.config}

    def restore(self, held: Exported, folder: Path, target: Target) -> BlockDrafter:
        tensors = dict(held.tensors)
        factors = tensors.pop(_FREQUENCIES, None)
        if "d2t" in tensors:
            tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
        layout = "dspark" if "markov_rank" in held.config else "dflash"
        if _CONFIDENCE in tensors:
            held.config["enable_confidence_head"] = True
        return import_drafter(held.config, tensors, layout, folder, target, factors)


def _add_settings(writer: GGUFWriter, config: dict[str, Any]) -> None:
    for key, source, kind in _SETTINGS:
        getattr(writer, f"add_{kind}")(f"{ARCHITECTURE}.{key}", config[source])
    writer.add_array(_LAYERS, [i + 1 for i in config["target_layer_ids"]])  # hidden_states[i + 1]
    scale = config.get("dflash_config", {}).get("input_embedding_scale")
    if scale is not None:
        writer.add_float32(_SCALE, float(scale))
    if config["hidden_act"] != "silu":
        writer.add_string(_ACTIVATION, config["hidden_act"])
    if "markov_rank" in config:
        writer.add_bool(_FROM_ANCHOR, config["sample_from_anchor"])
        writer.add_bool(f"{ARCHITECTURE}.has_confidence_head", config["enable_confidence_head"])


def _read_settings(words: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> dict[str, Any]:
    """The file's keys as a config of DFlash's or DSpark's layout. Raises UserError for a missing
    one."""
    required = [*(f"{ARCHITECTURE}.{key}" for key, _, _ in _SETTINGS), _LAYERS, _MASK]
    for key in required:
        if key not in words:
            raise UserError(f"{path}: misses {key}")
    found = {source: words[f"{ARCHITECTURE}.{key}"] for key, source, _ in _SETTINGS}
    found |= {
        "target_layer_ids": [i - 1 for i in words[_LAYERS]],
        "mask_token_id": words[_MASK],
        "hidden_act": words.get(_ACTIVATION, "silu"),
    }
    if W1 in tensors:
        found["markov_rank"] = tensors[W1].shape[1]
        found["markov_head_type"] = "vanilla"
        found["sample_from_anchor"] = bool(words.get(_FROM_ANCHOR, True))
    if _SCALE in words:
        found["dflash_config"] = {"input_embedding_scale": words[_SCALE]}
    return found


def _add_tensor(writer: GGUFWriter, name: str, data: Tensor, dtype: torch.dtype) -> None:
    stored = {
        torch.bfloat16: GGMLQuantizationType.BF16,
        torch.float16: GGMLQuantizationType.F16,
    }.get(dtype)
    if not data.is_floating_point():
        writer.add_tensor(name, np.ascontiguousarray(data.to(torch.int64).numpy()))
        return
    rows = np.ascontiguousarray(data.float().numpy())
    if data.dim() < 2 or stored is None:
        writer.add_tensor(name, rows)
    else:
        writer.add_tensor(name, quants.quantize(rows, stored), raw_dtype=stored)


def _to_torch(tensor: Any) -> Tensor:
    """A tensor of the file in the type that it is stored in."""
    shape = [int(n) for n in reversed(tensor.shape)]
    data = np.array(tensor.data)
    if tensor.tensor_type == GGMLQuantizationType.BF16:
        return torch.from_numpy(data.view(np.int16).reshape(shape)).view(torch.bfloat16)
    return torch.from_numpy(data.reshape(shape))


def to_gguf_name(name: str) -> str:
    """A tensor's published name → GGUF's."""
    if not name.startswith("layers."):
        return _TOP.get(name, name)
    _, layer, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def from_gguf_name(name: str) -> str:
    """GGUF's name of a tensor → the published one."""
    if not name.startswith("blk."):
        return {theirs: ours for ours, theirs in _TOP.items()}.get(name, name)
    _, layer, part, kind = name.split(".")
    published = {theirs: ours for ours, theirs in _LAYER.items()}.get(part, part)
    return f"layers.{layer}.{published}.{kind}"


def _read_vocabulary(path: Path) -> dict[str, tuple[Any, Any, Any]]:
    """The tokenizer's keys of a GGUF file → value, its type, and the type of an array's entries."""
    read_header(path)  # GGUFReader would follow an array of any length
    found: dict[str, tuple[Any, Any, Any]] = {}
    for key, field in GGUFReader(path).fields.items():
        if not key.startswith("tokenizer.") or key == "tokenizer.chat_template":
            continue
        array = field.types[0] == GGUFValueType.ARRAY
        found[key] = field.contents(), field.types[0], field.types[-1] if array else None
    if not isinstance(found.get("tokenizer.ggml.tokens", (None,))[0], list):
        raise ValueError("it has no vocabulary")
    return found


GGUF = GGUFFormat("gguf", make_gguf, serve_gguf, library="llama.cpp", tags=("gguf",))
