"""Block drafters as GGUF files for llama.cpp (architecture `dflash`; `--spec-type draft-dflash`, or `draft-dspark` where it is anchor-first or has a Markov head).

The tensors are DFlash's (arXiv 2602.06036) and DSpark's (arXiv 2607.05147) under GGUF's names. The vocabulary is the target's, out of
its own GGUF file: llama.cpp compares both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from align.common.errors import UserError, in_one_line
from align.gguf.header import read_header
from align.models.block import BlockDrafter
from align.target.inspection.parts import embedding_scale
from decode.exporting.base import Format
from decode.exporting.folder import EMBEDDING, Exported
from decode.exporting.formats import check_trained, dflash, dspark, no_biases

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURE, FILE = "dflash", "drafter.gguf"
TOP = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight", "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}  # fmt: skip
"""DFlash's and DSpark's names of what is there once, and GGUF's."""
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Of each layer: `layers.3.self_attn.q_proj.weight` → `blk.3.attn_q.weight`."""
SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim", "rope.dimension_count": "head_dim",
    "context_length": "max_position_embeddings", "vocab_size": "vocab_size", "block_size": "block_size",
}  # fmt: skip
"""GGUF's names of sizes, and the config's."""


def gguf(drafter: BlockDrafter) -> Exported:
    """What the file holds, still under DFlash's or DSpark's names; `d2t` holds token ids.

    Raises:
        UserError: a drafter that llama.cpp's architecture can't hold.
    """
    c = drafter.config
    if c.context == "taps" and c.hidden_act not in ("silu", "gelu", "gelu_pytorch_tanh"):
        raise UserError(f"--format gguf: llama.cpp's drafters have silu or gelu, this one has {c.hidden_act}")
    said = f"llama.cpp has DSpark's vanilla Markov head alone, this drafter's is {c.markov_kind!r}"
    other = c.markov_kind not in ("", "vanilla", "linear")
    biases = no_biases(c, "the attention of llama.cpp's drafters has no biases")
    check_trained(drafter, "gguf", biases, (other, said, "drafter.markov=vanilla or linear"))
    plain = c.context != "taps" or (c.fill_in and drafter.markov is None)
    made = (dflash if plain else dspark)(drafter, "gguf")
    name = "confidence_head.proj.weight"
    if name in made.tensors:  # llama.cpp's always has columns of W1
        missing = c.hidden_size + made.config["markov_rank"] - made.tensors[name].shape[1]
        made.tensors[name] = F.pad(made.tensors[name], (0, missing))
    if (factors := _frequencies(drafter, made.config["rope_theta"])) is not None:
        made.tensors["rope_freqs.weight"] = factors
    if "d2t" in made.tensors:
        d2t = made.tensors["d2t"]
        made.tensors["d2t"] = d2t + torch.arange(len(d2t), device=d2t.device)
    if made.tensors.pop(EMBEDDING, None) is not None:  # llama.cpp has a key for the scale
        made.config["dflash_config"] = {"input_embedding_scale": embedding_scale(drafter.target)}
    made.notes = [note for note in made.notes if "vLLM" not in note]
    return made


def _frequencies(drafter: BlockDrafter, theta: float) -> Tensor | None:
    """By how much each pair of a head turns more slowly than by the base `theta`, (d / 2); None = none does."""
    c, target = drafter.config, drafter.target
    plain = theta ** -(torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    if c.rotaries:
        if c.rotaries[0].scale != 1:
            raise UserError(
                f"--format gguf: its rotary tables are {c.rotaries[0].scale:g} times as long (YaRN's attention factor), and this "
                "format holds fixed frequencies"
            )
        factors = plain / torch.tensor(c.rotaries[0].inv_freq, dtype=torch.float64)
        return None if bool(((factors - 1).abs() < 1e-4).all()) else factors.float()
    module = target.body.rotary_emb
    kind = str(getattr(module, "rope_type", "default"))
    if kind == "default":
        return None
    if kind in ("dynamic", "longrope") or float(getattr(module, "attention_scaling", 1.0)) != 1.0:
        raise UserError(
            f"--format gguf: rope_type={kind} depends on the text's length or scales attention, and this format holds fixed frequencies"
        )
    return (plain / module.inv_freq.double().cpu()).float()


class GGUFFormat(Format):
    """One GGUF file, matrices in the type that is asked for and vectors in fp32, as llama.cpp wants them."""

    def check(self, made: Exported, vocabulary: Path | None) -> None:
        """Raises UserError where the target's GGUF file is not named, is none, or has a vocabulary of another size or none at all."""
        if vocabulary is None:
            raise UserError(
                "--format gguf: name the target's own GGUF file, whose vocabulary it takes: --target-gguf FILE"
            )
        if not vocabulary.is_file():
            raise UserError(f"--target-gguf={vocabulary}: no such file")
        with in_one_line(f"--target-gguf={vocabulary}: can't be read"):
            count = len(_vocabulary(vocabulary)["tokenizer.ggml.tokens"][0])
        if count != (wanted := made.config["vocab_size"]):
            raise UserError(
                f"--target-gguf={vocabulary}: has {count} tokens, the drafter's target has {wanted}"
            )

    def fill(
        self, part: Path, made: Exported, name: str, dtype: torch.dtype, vocabulary: Path | None
    ) -> None:
        from gguf import GGUFWriter

        assert vocabulary is not None
        writer = GGUFWriter(part / FILE, ARCHITECTURE)
        writer.add_name(name)
        _add_settings(writer, made.config)
        for key, (value, kind, sub) in _vocabulary(vocabulary).items():
            writer.add_key_value(key, value, kind, sub)
        writer.add_uint32("tokenizer.ggml.mask_token_id", int(made.config["mask_token_id"]))
        _add_tensors(writer, made.tensors, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_settings(writer: GGUFWriter, config: dict[str, Any]) -> None:
    for key, source in SIZES.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", int(config[source]))
    writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", float(config["rms_norm_eps"]))
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", float(config["rope_theta"]))
    writer.add_bool(f"{ARCHITECTURE}.attention.causal", False)
    taps = [i + 1 for i in config["target_layer_ids"]]  # hidden_states[i + 1]
    writer.add_array(f"{ARCHITECTURE}.target_layers", taps)
    if (scale := config.get("dflash_config", {}).get("input_embedding_scale")) is not None:
        writer.add_float32(f"{ARCHITECTURE}.embedding_scale", float(scale))
    if config["hidden_act"] != "silu":
        writer.add_string(f"{ARCHITECTURE}.hidden_activation", config["hidden_act"])
    if "markov_rank" in config:
        writer.add_bool(f"{ARCHITECTURE}.sample_from_anchor", config["sample_from_anchor"])
        writer.add_bool(f"{ARCHITECTURE}.has_confidence_head", bool(config["enable_confidence_head"]))


def _add_tensors(writer: GGUFWriter, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    from gguf import GGMLQuantizationType, quants

    stored = {torch.bfloat16: GGMLQuantizationType.BF16, torch.float16: GGMLQuantizationType.F16}.get(dtype)
    for name, tensor in tensors.items():
        data = tensor.detach().cpu()
        if not data.is_floating_point():
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(data.to(torch.int64).numpy()))
            continue
        rows = np.ascontiguousarray(data.float().numpy())
        if data.dim() < 2 or stored is None:
            writer.add_tensor(gguf_name(name), rows)
        else:
            writer.add_tensor(gguf_name(name), quants.quantize(rows, stored), raw_dtype=stored)


def gguf_name(name: str) -> str:
    """DFlash's or DSpark's name of a tensor → GGUF's."""
    if name in TOP or not name.startswith("layers."):
        return TOP.get(name, name)
    _, layer, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{LAYER[part]}.{kind}"


def _vocabulary(path: Path) -> dict[str, tuple[Any, Any, Any]]:
    """A GGUF file's own words about its tokens: key → value, its type, and the type of an array's entries."""
    from gguf import GGUFReader, GGUFValueType

    read_header(path)  # gguf's own reader would go through an array of any length that the file names
    found = {}
    for key, field in GGUFReader(path).fields.items():
        if not key.startswith("tokenizer.") or key == "tokenizer.chat_template":
            continue
        array = field.types[0] == GGUFValueType.ARRAY
        found[key] = field.contents(), field.types[0], field.types[-1] if array else None
    if not isinstance(found.get("tokenizer.ggml.tokens", (None,))[0], list):
        raise ValueError("it has no vocabulary")
    return found
