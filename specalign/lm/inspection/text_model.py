"""A target as a causal language model of text alone: what it is, or what it wraps next to towers for
images and sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specalign.lm.inspection.anatomy import decoder

if TYPE_CHECKING:
    from specalign.lm.model import Target


@dataclass(frozen=True)
class TextModel:
    """base: the class's name in transformers. tensors: weights by that class's names. embedding,
    head: the names of the two."""

    base: str
    config: PreTrainedConfig
    tensors: dict[str, Tensor]
    embedding: str
    head: str


def text_model(target: Target) -> TextModel:
    """The target as such a model; its tensors are the target's own.

    Raises:
        NotImplementedError: its weights are quantised, or transformers has no such class.
    """
    model, config = target.model, target.config
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotImplementedError("its layers are quantised")
    if model.config is config:
        embedding, head = embedding_names(model)
        return TextModel(type(model).__name__, config, dict(model.state_dict()), embedding, head)
    base = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if base is None:
        raise NotImplementedError(
            f"transformers has no causal language model of its text alone ({config.model_type})"
        )
    with torch.device("meta"):
        empty = getattr(transformers, base)(config)
    body = decoder(empty)
    if type(body) is not type(target.body):
        raise NotImplementedError(
            f"{base}, the causal language model of its text alone, is built in another way"
        )
    embedding, head = embedding_names(empty)
    inside = _name(empty, body).removesuffix("weight")
    tensors = {f"{inside}{name}": tensor for name, tensor in target.body.state_dict().items()}
    tensors |= {embedding: target.embedding_VD, head: target.head_weight_VD}
    if target.head_bias_V is not None:
        tensors[f"{head.removesuffix('weight')}bias"] = target.head_bias_V
    return TextModel(base, config, tensors, embedding, head)


def is_tied(target: Target) -> bool:
    """Whether the target's head is its embedding. The tensors say so: the config's flag may be
    wrong, and a is_tied head may have been copied to be kept in half the memory, or in another
    order."""
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


def _name(model: PreTrainedModel, part: Any) -> str:
    """The name that a part's weight has in the model."""
    return f"{next(name for name, module in model.named_modules() if module is part)}.weight"
