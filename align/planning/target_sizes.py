"""A target's sizes from its config.json: its network is built on torch's `meta` device, where
tensors take no memory."""

from dataclasses import dataclass
from typing import Any

import torch

from specalign.common.errors import UserError
from specalign.common.hub import model_folder
from specalign.lm.debug import debug_model
from specalign.lm.inspection.anatomy import (
    context_limit,
    decoder_layers,
    find_body,
    inspect_model,
    query_heads,
)
from specalign.lm.loading import resolve_folder
from specalign.lm.names import DEBUG
from specalign.lm.opening import cannot_load, empty_model, quiet_loading


@dataclass(frozen=True)
class TargetSizes:
    """Counts of numbers, not bytes. parameters: all, a tied head counted once. layers: of each
    layer. tables: of embedding and head. cached: by the layers per token. linears: name, and inputs
    and outputs together, of the last layer's linear layers. has_weights: they are on this machine.
    """

    spec: str
    parameters: int
    layers: tuple[int, ...]
    tables: int
    last_norm: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cached: int
    vocab_size: int
    context_limit: int
    linears: tuple[tuple[str, int], ...]
    has_weights: bool

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def read_target_sizes(
    spec: str, revision: str | None = None, trust_remote_code: bool = False
) -> TargetSizes:
    """The sizes of a folder, a GGUF file, a hub id (only its config is fetched) or a debug model.
    Raises UserError: no config, or one of a model that can't be a target."""
    if spec in DEBUG:
        return _measure(debug_model(DEBUG[spec])[0].to("meta"), spec, True)
    folder = resolve_folder(spec)
    if isinstance(folder, str):
        folder = model_folder(folder, "target", ["*.json", "*.py"], revision)
    quiet_loading()
    try:
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        return _measure(empty_model(folder, spec, options), spec, any(folder.glob("*.safetensors")))
    except UserError:
        raise
    except Exception as error:  # transformers' errors for broken configs have no common class
        raise cannot_load("target", spec, error) from None


def _measure(model: Any, spec: str, has_weights: bool) -> TargetSizes:
    config = model.config.get_text_config(decoder=True)
    body = find_body(model)
    layers = decoder_layers(body, config.num_hidden_layers)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # on `meta` tied weights may be two tensors
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    tied = bool(is_tied) and embedding.shape == head.shape
    linears = [(n, m) for n, m in layers[-1].named_modules() if isinstance(m, torch.nn.Linear)]
    model.set_experts_implementation("batched_mm")  # grouped products take only bf16 on `meta`
    model.set_attn_implementation("eager")  # masks of sdpa may read values, which `meta` lacks
    anatomy = inspect_model(model, body)
    kv_heads, head_dim = anatomy.heads()
    return TargetSizes(
        spec=spec,
        parameters=_count(model) - (head.numel() if tied and embedding is not head else 0),
        layers=tuple(_count(layer) for layer in layers),
        tables=embedding.numel() * (1 if tied else 2),
        last_norm=max(0, _count(body) - _count(layers) - embedding.numel()),
        hidden_size=head.shape[1],
        inner_size=max((m.out_features for _, m in linears), default=4 * head.shape[1]),
        num_heads=query_heads(config),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        cached=sum(shape.numbers for shape in anatomy.shapes if shape is not None),
        vocab_size=head.shape[0],
        context_limit=context_limit(config),
        linears=tuple((name, m.in_features + m.out_features) for name, m in linears),
        has_weights=has_weights,
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
