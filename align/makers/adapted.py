"""Masked-diffusion language models made from an autoregressive target (DiffuLLaMA, arXiv
2410.17891)."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specalign.common.errors import UserError
from specalign.formats.masked_lm import ADAPTED, adapted_from
from specalign.formats.opened import refuse_on_error
from specalign.lm.inspection.text_model import TextModel, text_model, tied
from specalign.lm.model import Target
from specalign.models.masked_lm import MaskedLM


def own_layers(target: Target, layers: Sequence[int]) -> TextModel:
    """Config and weights, copied in fp32, of a causal language model with only these layers of the
    target, in this order, and without towers for images and sound.

    Raises:
        UserError: a layer that the target lacks. NotImplementedError: a wrapper of a text model
            that transformers lacks.
    """
    if not layers or not all(0 <= i < target.num_layers for i in layers):
        raise UserError(
            f"layers={list(layers)}: target {target.spec!r} has layers 0 to {target.num_layers - 1}"
        )
    whole = text_model(target)
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = len(layers)
    config.tie_word_embeddings = tied(target)
    for key, value in vars(whole.config).items():  # a list with an entry for each layer
        if isinstance(value, list) and len(value) == target.num_layers and "token" not in key:
            setattr(config, key, [value[i] for i in layers])
    tensors: dict[str, Tensor] = {}
    for name, tensor in whole.tensors.items():
        layer = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
        copies = [name]
        if layer is not None:
            before, after = name[: layer.start(1)], name[layer.end(1) :]
            copies = [
                f"{before}{new}{after}" for new, old in enumerate(layers) if old == int(layer[1])
            ]
        for copied in copies:
            tensors[copied] = tensor.detach().to(torch.float32, copy=True)
    return replace(whole, config=config, tensors=tensors)


def adapt(
    target: Target,
    layers: Sequence[int],
    mask_token_id: int,
    *,
    attention: str = "prefix_causal",
    share_embedding: bool = True,
) -> MaskedLM:
    """A diffusion drafter that starts from these layers of an autoregressive target and its norm.

    The target's shift is kept (DiffuLLaMA, arXiv 2410.17891). `attention`: full or prefix_causal,
    the default mask. `share_embedding`: the target's embedding and head are used, frozen and not
    stored; else they are copied, trained and stored, tied if the target's are.

    Raises:
        UserError: a layer, mask, attention or architecture that does not fit.
    """
    where = f"target {target.spec!r}"
    with refuse_on_error(where, "masked_lm", NotImplementedError):
        own = own_layers(target, layers)
    source = {
        "architectures": list(ADAPTED.architectures),
        "model_type": ADAPTED.model_type,
        "base": own.base,
        "base_config": own.config.to_diff_dict(),
        "layers": list(layers),
        "shift": ADAPTED.shift,
        "attention": attention,
        "mask_token_id": mask_token_id,
        "share_embedding": share_embedding,
        "target": target.spec,
        "target_sha256": target.hash,
    }
    if share_embedding:
        for name in (own.embedding, own.head):
            own.tensors.pop(name, None)
    # a target without its layers: trained weights will replace the zeros
    tensors = {
        k: torch.zeros_like(v, device="cpu") if v.is_meta else v for k, v in own.tensors.items()
    }
    return adapted_from(source, where, tensors, target).to(target.device)
