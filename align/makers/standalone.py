"""Drafters that are networks of their own, as a recipe describes them: diffusion drafters and small
causal language models, from `drafter.init`, the target's layers or scratch."""

import copy
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers
from torch import Tensor

from align.config.drafter import DrafterConfig
from align.makers.geometry import first_layers, mask_token, note_ignored
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.formats.equality import (
    check_served,
    first_tokens_logits,
    refusal_error,
    refuse_on_error,
)
from specalign.formats.masked_lm import ADAPTED, adapted_from
from specalign.formats.standalone import architecture, load_standalone
from specalign.lm.inspection.parts import TextModel, is_tied, text_model
from specalign.lm.loading import load_target
from specalign.lm.masks import OWN, register
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.lm.opening import quiet_loading
from specalign.lm.proof import prove_target
from specalign.models.causal import CausalConfig, CausalDrafter
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig
from specalign.models.families import BASES
from specalign.models.masked_lm import MaskedLM, with_lora
from specalign.models.standalone import DiffusionConfig, DiffusionDrafter


def make_standalone(target: Target, options: DrafterConfig, seed: int = 0) -> DiffusionDrafter:
    """A diffusion drafter. Raises UserError for an option that does not fit the target."""
    if options.init is not None:
        drafter = _continue_from(options.init, target, options)
    else:
        drafter = _make_fresh(target, options, seed)
    if options.lora_rank and isinstance(drafter.network, MaskedLM):
        with_lora(drafter.network, options.lora_rank, options.lora_targets, seed)
    return drafter.to(target.device)


def _continue_from(init: str, target: Target, options: DrafterConfig) -> DiffusionDrafter:
    try:
        drafter = load_standalone(init, target, attention_backend=options.attention_backend)
    except UserError as error:
        raise UserError(f"drafter.init: {error}") from None
    network, process = drafter.network, drafter.config
    if isinstance(network, MaskedLM) != (options.kind == "masked_lm"):
        raise UserError(f"drafter.init={init!r} is not of drafter.kind={options.kind}")
    has: JsonObject = {"attention": network.attention}
    if isinstance(network, MaskedLM):
        has["layers"] = network.model.config.num_hidden_layers
        has["mask_token_id"] = network.mask_token_id
    else:
        c = network.config
        same = ("hidden_size", "cond_dim", "dropout", "time_input")
        has |= {name: getattr(c, name) for name in same}
        has |= {"layers": c.n_blocks, "heads": c.n_heads, "prediction": process.prediction}
        has["schedule"] = process.schedule["name"]
    note_ignored(options, has)
    config = replace(process, block_size=options.block_size, window=options.window)
    return DiffusionDrafter(network, config, target)


def _make_fresh(target: Target, options: DrafterConfig, seed: int) -> DiffusionDrafter:
    network: DDiT | MaskedLM
    prediction = options.prediction
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if options.kind == "masked_lm":
            mask = mask_token(target) if options.mask_token_id is None else options.mask_token_id
            layers, share = first_layers(target, options), options.share_embedding
            network = adapt(
                target, layers, mask, attention=options.attention, share_embedding=share
            )
            prediction = "logits"  # not log-scores: their sum is far from 1
        else:
            network = DDiT(ddit_config(options, target.vocab_size), options.attention_backend)
    config = DiffusionConfig(
        block_size=options.block_size,
        vocab_size=target.vocab_size,
        schedule={"name": options.schedule},
        prediction=prediction,
        window=options.window,
        target=target.spec,
        target_sha256=target.hash,
        network=architecture(network),
    )
    return DiffusionDrafter(network, config, target)


def ddit_config(options: DrafterConfig, vocab_size: int) -> DDiTConfig:
    """The network of a fresh `ddit` drafter; `vocab_size`: the target's."""
    return DDiTConfig(
        vocab_size=vocab_size + 1,
        hidden_size=options.hidden_size,
        n_blocks=options.layers,
        n_heads=options.heads,
        cond_dim=options.cond_dim,
        dropout=options.dropout,
        time_input=options.time_input,
        scale_by_sigma=options.prediction == "log_score",
        attention=options.attention,
    )


def own_layers(target: Target, layers: Sequence[int]) -> TextModel:
    """Config and weights, copied in fp32, of a causal language model with only these layers of the
    target, in this order, and without towers for images and sound. Raises NotImplementedError: a
    wrapper of a text model that transformers lacks."""
    count, whole = target.num_layers, text_model(target)
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = len(layers)
    config.tie_word_embeddings = is_tied(target)
    for key, value in vars(whole.config).items():  # a list with an entry for each layer
        if isinstance(value, list) and len(value) == count and "token" not in key:
            setattr(config, key, [value[i] for i in layers])
    tensors: dict[str, Tensor] = {}
    for name, tensor in whole.tensors.items():
        layer, names = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name), [name]
        if layer is not None:
            before, after = name[: layer.start(1)], name[layer.end(1) :]
            places = [new for new, old in enumerate(layers) if old == int(layer[1])]
            names = [f"{before}{new}{after}" for new in places]
        for copied in names:
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
    """A diffusion drafter that starts from these layers of an autoregressive target and its norm,
    with the target's shift (DiffuLLaMA, arXiv 2410.17891).

    `share_embedding`: the target's embedding and head are used, frozen and not stored; else they
    are copied, trained and stored, tied if the target's are. Raises UserError for a mask, attention
    or architecture that does not fit."""
    where = f"target {target.spec!r}"
    with refuse_on_error(where, "masked_lm", NotImplementedError):
        own = own_layers(target, layers)
    source = {
        "architectures": list(ADAPTED.architectures),
        "model_type": ADAPTED.model_type,
        "base": own.base,
        "base_config": own.config.to_diff_dict(),
        "layers": list(layers),
        "shift": MaskedLM.shift,
        "attention": attention,
        "mask_token_id": mask_token_id,
        "share_embedding": share_embedding,
        "target": target.spec,
        "target_sha256": target.hash,
    }
    shared = (own.embedding, own.head) if share_embedding else ()
    # of a target without its layers trained weights will replace the zeros
    tensors = {
        name: torch.zeros_like(t, device="cpu") if t.is_meta else t
        for name, t in own.tensors.items()
        if name not in shared
    }
    return adapted_from(source, where, tensors, target).to(target.device)


def make_causal(target: Target, options: DrafterConfig) -> CausalDrafter:
    """A small causal language model: `init`, any over the target's vocabulary, or some of the
    target's layers. Raises UserError for a layer, vocabulary or architecture that does not fit."""
    layers, own = first_layers(target, options), None
    if options.init is None:
        where = f"target {target.spec!r}"
        start = _layers_alone(target, layers)
    else:
        where, layers = f"drafter.init={options.init!r}", []
        trust, device = target.trust_remote_code, str(target.device)
        start = load_target(options.init, "float32", device, fast=False, trust_remote_code=trust)
        if start.vocab_size != target.vocab_size:
            sizes = f"{start.vocab_size}, target {target.spec!r} has {target.vocab_size}"
            raise UserError(f"{where} has a vocabulary of {sizes}")
        note_ignored(options, {"layers": start.num_layers})
        own = start.embedding_VD, start.head_weight_VD
        theirs = target.embedding_VD, target.head_weight_VD
        pairs = list(zip(own, theirs, strict=True))
        if all(a.shape == b.shape and torch.equal(a.float(), b.float()) for a, b in pairs):
            own = None
    if start.head_bias_V is not None:
        raise refusal_error(where, "autoregressive", NotImplementedError("its head has a bias"))
    model = start.model.requires_grad_(True)
    base, c = type(model).__name__, model.config
    served_LV = None if base in BASES else first_tokens_logits(start)
    config = CausalConfig(
        block_size=options.block_size,
        vocab_size=target.vocab_size,
        layers=layers,
        target=target.spec,
        target_sha256=target.hash,
        network={"base": base, "hidden_size": c.hidden_size, "layers": c.num_hidden_layers},
    )
    drafter = CausalDrafter(model, config, target, own).to(target.device)
    if served_LV is not None:
        check_served(drafter, served_LV, where)
    return drafter


def _layers_alone(target: Target, layers: list[int]) -> Target:
    """A model of these target layers. Raises UserError if the architecture has none."""
    try:
        own = own_layers(target, layers)
        base, config, known = own.base, own.config, own.base in BASES
        config.architectures = [base]
        quiet_loading()
        model, found = getattr(transformers, base).from_pretrained(
            None,
            config=config,
            state_dict=own.tensors,
            dtype=torch.float32,
            attn_implementation=register() if known else OWN,
            output_loading_info=True,
        )
        if lacking := sorted(found["missing_keys"]):
            raise NotImplementedError(f"layers {layers} alone lack {lacking[0]!r}")
        model.to(target.device)
        make = Target if known else prove_target
        return make(model, target.tokenizer, ModelSource(target.spec), fast=False)
    except Exception as error:  # models of fewer layers fail in many ways
        raise refusal_error(f"target {target.spec!r}", "autoregressive", error) from None
