"""Masked-diffusion language models made from an autoregressive target (DiffuLLaMA, arXiv 2410.17891)."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from align.common.errors import UserError, nearest
from align.models.checkpoints.masked_model import config_of, filled, skeleton, with_ids
from align.models.checkpoints.opened import check_opened, refusing
from align.models.families import BASES, Family
from align.models.masked_lm import MaskedLM
from align.target.inspection.text_model import TextModel, embedding_names, text_model, tied
from align.target.model import Target

ADAPTED = Family(
    name="adapted",
    hub_ids=(),
    model_type="adapted_masked_lm",
    architectures=("AdaptedMaskedLM",),
    base="",
    mask_token_id=0,
    shift=1,
)
"""What `adapt` makes; base, attention, cache and mask are filled in from its config.json."""
ATTENTIONS = ("full", "prefix_causal")


def own_layers(target: Target, layers: Sequence[int]) -> TextModel:
    """Config and weights, copied in fp32, of a causal language model with only these layers of the target, in this order, and
    without towers for images and sound.

    Raises:
        UserError: a layer that the target lacks. NotImplementedError: a wrapper of a text model that transformers lacks.
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
            copies = [f"{before}{new}{after}" for new, old in enumerate(layers) if old == int(layer[1])]
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
    """A diffusion drafter that starts from these layers of an autoregressive target, in this order, and from its norm.

    The target's shift is kept (DiffuLLaMA, arXiv 2410.17891). `attention`: full or prefix_causal, the default mask.
    `share_embedding`: the target's embedding and head are used, frozen and not stored; else they are copied, trained and
    stored, tied if the target's are.

    Raises:
        UserError: a layer, mask, attention or architecture that does not fit.
    """
    where = f"target {target.spec!r}"
    with refusing(where, "masked_lm", NotImplementedError):
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
    tensors = {k: torch.zeros_like(v, device="cpu") if v.is_meta else v for k, v in own.tensors.items()}
    return adapted_from(source, where, tensors, target).to(target.device)


def adapted_from(
    source: dict[str, Any], where: str, tensors: dict[str, Tensor], target: Target | None
) -> MaskedLM:
    """The network of an adapted drafter's config.json and tensors."""
    lacking = [
        k for k in ("base", "base_config", "attention", "mask_token_id", "share_embedding") if k not in source
    ]
    if lacking:
        raise UserError(f"{where}: missing key {lacking[0]!r}, so this is not an adapted drafter")
    base, kind = str(source["base"]), str(source["attention"])
    if base not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UserError(f"{where}: its architecture {base!r} can't be adapted{nearest(base, BASES)}")
    if kind not in ATTENTIONS:
        raise UserError(f"{where}: attention={kind!r} is unknown{nearest(kind, ATTENTIONS)}")
    family = replace(
        ADAPTED,
        base=base,
        attention="full" if kind == "full" else "prefix_causal",
        cache="none" if kind == "full" else "exact",
        shift=1 if source.get("shift", 1) else 0,
    )
    config = config_of(base, source["base_config"], where)
    shared = target if source["share_embedding"] else None
    if source["share_embedding"]:
        if target is None:
            raise UserError(f"{where}: made for target {source.get('target')!r}, which has to be given")
        sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
        for key, value in sizes.items():
            if getattr(config, key) != value:
                raise UserError(
                    f"{where}: {key} is {getattr(config, key)}, target {target.spec!r} has {value}; "
                    f"it was made for {source.get('target')!r}"
                )
        names = embedding_names(skeleton(base, config, where))
        tensors |= dict(zip(names, (target.embedding_VD, target.head_weight_VD), strict=True))
    with nullcontext() if base in BASES else refusing(where, "masked_lm"):
        model = filled(family, config, tensors, where)
    network = MaskedLM(model, with_ids(family, source, None, config.vocab_size, where), source, shared)
    if base not in BASES:
        check_opened(network, where)
    return network
