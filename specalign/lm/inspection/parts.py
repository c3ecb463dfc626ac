"""A target's weights by other names: a layer's by a block drafter's, which starts with them, and
all by those of a model of text alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specalign.lm.inspection.anatomy import find_body

if TYPE_CHECKING:
    from specalign.lm.model import Target

_LINEARS = {
    "self_attn.q_proj": ("q_proj",),
    "self_attn.k_proj": ("k_proj",),
    "self_attn.v_proj": ("v_proj",),
    "self_attn.o_proj": ("o_proj", "out_proj", "dense", "attn.c_proj"),
    "mlp.gate_proj": ("gate_proj", "w1"),
    "mlp.up_proj": ("up_proj", "w3"),
    "mlp.down_proj": ("down_proj", "w2"),
}
"""A drafter's projections, and what they are called in layers."""
_QKV = ("qkv_proj", "attn.c_attn")
"""Projections of queries, keys and values in one, in this order."""
_NORMS = {
    "input_layernorm": ("input_layernorm", "ln_1", "operator_norm"),
    "post_attention_layernorm": (
        "pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ffn_norm",
    ),
    "self_attn.q_norm": ("self_attn.q_norm", "self_attn.q_layernorm"),
    "self_attn.k_norm": ("self_attn.k_norm", "self_attn.k_layernorm"),
}  # fmt: skip
"""A drafter's norms, and what they are called in layers, the first name first."""
_LAST_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")


def embedding_scale(target: Target) -> float:
    """The factor that the model applies to embeddings inside its embedding module (Gemma)."""
    scale = getattr(target.model.get_input_embeddings(), "embed_scale", None)
    return 1.0 if scale is None else float(scale)


@torch.no_grad()
def embeds_rows(target: Target) -> bool:
    """Whether a token's embedding is its row times that scale (Muse Glimmer norms it)."""
    rows = target.embedding_VD[:16]
    read = target.embed(torch.arange(len(rows), device=rows.device))
    return torch.allclose(
        read.float(), rows.float() * embedding_scale(target), rtol=2e-2, atol=1e-6
    )


def last_norm(target: Target) -> Tensor | None:
    """The weight of the norm that writes the last hidden state; None where there is none."""
    for name in _LAST_NORMS:
        module = getattr(target.body, name, None)
        if module is not None:
            return norm_weight(module, target.hidden_size)
    return None


def layer_parts(target: Target, index: int) -> dict[str, Tensor]:
    """A layer's weights, fp32, by a drafter's parameter names, without unidentified ones."""
    modules = {f".{name}": module for name, module in target.layers[index].named_modules()}
    found: dict[str, Tensor] = {}

    def add(module: nn.Module, sizes: dict[str, int]) -> None:
        """Add a projection's outputs, split by these sizes."""
        weight, bias = _matrix(module), getattr(module, "bias", None)
        if weight is None or len(weight) != sum(sizes.values()):
            return
        split = [*sizes.values()]
        found.update(zip([f"{n}.weight" for n in sizes], weight.split(split), strict=True))
        if bias is not None:
            parts = bias.detach().float().split(split)
            found.update(zip([f"{n}.bias" for n in sizes], parts, strict=True))

    for mine, names in _LINEARS.items():
        matches = _find(modules, names)
        weight = _matrix(matches[0]) if len(matches) == 1 else None
        if weight is not None:
            add(matches[0], {mine: len(weight)})
    q, kv = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    for module in _find(modules, _QKV):
        add(module, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv})
    down = found.get("mlp.down_proj.weight")
    if down is not None:
        for module in _find(modules, ("mlp.gate_up_proj",)):
            add(module, dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), down.shape[1]))
    if "mlp.gate_proj.weight" not in found:  # another kind of feed-forward
        found = {name: tensor for name, tensor in found.items() if not name.startswith("mlp.")}
    for mine, names in _NORMS.items():
        norm = next((modules[f".{name}"] for name in names if f".{name}" in modules), None)
        weight = getattr(norm, "weight", None)
        gated = not mine.startswith("post_") or "mlp.gate_proj.weight" in found
        if weight is not None and weight.dim() == 1 and gated:
            found[f"{mine}.weight"] = norm_weight(norm, len(weight))
    return found


def _find(modules: dict[str, nn.Module], names: tuple[str, ...]) -> list[nn.Module]:
    """The modules whose name ends with one of these."""
    endings = tuple(f".{name}" for name in names)
    return [module for name, module in modules.items() if name.endswith(endings)]


def _matrix(module: nn.Module) -> Tensor | None:
    """The weight of a linear layer as (out, in), fp32; None of another kind, or quantised."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2 or weight.dtype.itemsize == 1:
        return None
    weight = weight.detach().float()
    return weight.T if type(module).__name__.endswith("Conv1D") else weight


@torch.no_grad()
def norm_weight(module: Any, width: int) -> Tensor:
    """A norm's factor, (width,) fp32: its weight, or one more; ones where it has none."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.shape != (width,):
        return torch.ones(width)
    probe = torch.ones_like(weight)
    probe[::2] = -1  # which norms, and norms of centred numbers, leave as it is
    try:
        factor = (module(probe[None, None]) - module(-probe[None, None]))[0, 0] * probe / 2
    except Exception:  # one that is called in another way
        factor = weight
    forms = (weight.detach().float().cpu(), weight.detach().float().cpu() + 1)
    return min(forms, key=lambda form: float((form - factor.float().cpu()).abs().max()))


@dataclass(frozen=True)
class TextModel:
    """base: a class of transformers. tensors: its weights. embedding, head: names of the two."""

    base: str
    config: PreTrainedConfig
    tensors: dict[str, Tensor]
    embedding: str
    head: str


def text_model(target: Target) -> TextModel:
    """The target as a causal language model of text alone: what it is, or what it wraps next to
    towers for images and sound. Its tensors are the target's own. Raises NotImplementedError if its
    weights are quantised, or transformers has no such class."""
    model, config = target.model, target.config
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotImplementedError("its layers are quantized")
    if model.config is config:
        embedding, head = embedding_names(model)
        return TextModel(type(model).__name__, config, dict(model.state_dict()), embedding, head)
    base = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if base is None:
        raise NotImplementedError(f"transformers has no text-only {config.model_type}")
    with torch.device("meta"):
        empty = getattr(transformers, base)(config)
    body = find_body(empty)
    if type(body) is not type(target.body):
        raise NotImplementedError(f"the text-only {base} is built differently")
    embedding, head = embedding_names(empty)
    inside = _name(empty, body).removesuffix("weight")
    tensors = {f"{inside}{name}": tensor for name, tensor in target.body.state_dict().items()}
    tensors |= {embedding: target.embedding_VD, head: target.head_weight_VD}
    if target.head_bias_V is not None:
        tensors[f"{head.removesuffix('weight')}bias"] = target.head_bias_V
    return TextModel(base, config, tensors, embedding, head)


def is_tied(target: Target) -> bool:
    """Whether the target's head is its embedding. The tensors say so: the config's flag may be
    wrong, and a tied head may have been copied."""
    one, other = target.embedding_VD, target.head_weight_VD
    if one.data_ptr() == other.data_ptr():
        return True
    flag = bool(getattr(target.model.config, "tie_word_embeddings", False))
    if one.shape != other.shape or not (flag or one.dtype != other.dtype):
        return False
    return torch.equal(one.float(), other.float())


def embedding_names(model: PreTrainedModel) -> tuple[str, str]:
    """Names of the embedding and of the head among a model's parameters."""
    return _name(model, model.get_input_embeddings()), _name(model, model.get_output_embeddings())


def _name(model: PreTrainedModel, part: nn.Module) -> str:
    """The name that a part's weight has in the model."""
    return f"{next(name for name, module in model.named_modules() if module is part)}.weight"
