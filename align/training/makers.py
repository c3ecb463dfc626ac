"""New drafters as a recipe's drafter group asks for them: from the target's layers, from nothing, or from `drafter.init`."""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers
from torch import Tensor

from align.common.errors import UserError
from align.common.text import say
from align.config.recipe import DrafterConfig
from align.models.block import BlockDrafter
from align.models.block_checkpoint import (
    initialise,
    load_drafter,
    with_confidence,
    with_convolution,
    with_low_rank,
    with_markov,
    with_self_conditioning,
    without_confidence,
)
from align.models.block_config import BlockConfig, rotary_entry
from align.models.causal import CausalConfig, CausalDrafter
from align.models.ddit import DDiT, DDiTConfig
from align.models.families import BASES
from align.models.markov import OLD_NAMES
from align.models.masked_checkpoint import adapt, own_layers
from align.models.masked_lm import MaskedLM, with_lora
from align.models.opened import check_served, first_tokens_logits, refused
from align.models.standalone import DiffusionConfig, DiffusionDrafter
from align.models.standalone_checkpoint import architecture, load_standalone
from align.target.interface import OWN, register
from align.target.keys import Rotary, plain_rotary
from align.target.loading import load_target, quiet_loading
from align.target.model import Target
from align.target.proof import proven
from align.training.geometry import (
    activation,
    check_taps,
    first_layers,
    has_attention_bias,
    inner_size,
    named_layers,
    norm_eps,
    own_shape,
    own_tables,
    shared_keys,
    start_layers,
    tap_layers,
)

# ---- which token is the mask ----


def mask_token(target: Target) -> int:
    """A row of the frozen embedding that text never uses: a padding row, else an unused special token.

    Raises:
        UserError: the vocabulary has neither (name one with drafter.mask_token_id).
    """
    tokenizer = target.tokenizer
    if target.vocab_size > len(tokenizer):
        return target.vocab_size - 1
    taken = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        *target.eos_ids,
    }
    template = str(getattr(tokenizer, "chat_template", "") or "")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for index, token in sorted(added.items()):
        if index not in taken and index < target.vocab_size and str(token) not in template:
            return int(index)
    raise UserError(
        f"target {target.spec!r} has no unused special token for the mask; name one: drafter.mask_token_id=ID"
    )


# ---- block drafters ----


def make_block(
    target: Target, options: DrafterConfig, draft_vocab: Tensor | None, seed: int = 0
) -> BlockDrafter:
    """A block drafter after the recipe's drafter group: `init` as it was saved, with the confidence head, convolutions, second
    pass, Markov head and low-rank updates that are asked for, or a fresh one that drafts over `draft_vocab` (None = the whole
    vocabulary).

    Raises:
        UserError: an option that does not fit the target.
    """
    if options.init is None:
        drafter = from_target(target, options, draft_vocab, seed)
    else:
        drafter = load_drafter(options.init, target)
        _check_layout(drafter, options)
        if options.confidence_head:
            drafter = with_confidence(drafter)
        elif drafter.confidence is not None:
            say(
                "drafter.init: its confidence head is left out (drafter.confidence_head=true keeps it)",
                error=True,
            )
            drafter = without_confidence(drafter)
        if options.convolution:
            drafter = with_convolution(drafter)
        if options.self_conditioning:
            drafter = with_self_conditioning(drafter)
        drafter = _asked_markov(drafter, options, seed)
        # the same weights in another dtype are another target, and what is learnt here is this one
        drafter.config = replace(drafter.config, target=target.spec, target_sha256=target.hash)
    if options.lora_rank:
        with_low_rank(drafter, options.lora_rank, lora_alpha(options), options.lora_targets, seed)
    if options.train == "confidence_head":
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.startswith("confidence."))
    return drafter


def _check_layout(drafter: BlockDrafter, options: DrafterConfig) -> None:
    """Raises UserError where the recipe names another layout than `drafter.init` was trained in."""
    asked, own = options.block_layout, drafter.config.block_layout
    if asked not in (None, own):
        raise UserError(
            f"drafter.block_layout={asked}: drafter.init={options.init!r} was trained in {own}; leave it out"
        )


def _asked_markov(drafter: BlockDrafter, options: DrafterConfig, seed: int) -> BlockDrafter:
    """The drafter of `drafter.init` with the Markov head that `drafter.markov` names, fresh where its own is another; its own
    where it names none."""
    if options.markov is None:
        return drafter
    _check_rank(drafter.target, options.markov_rank)
    kind, width = markov_kind(options)
    config = drafter.config
    if (config.markov, config.markov_rank, config.markov_width) == (kind, options.markov_rank, width):
        return drafter
    if config.markov_rank:
        say(
            f"drafter.init: its Markov head ({config.markov_kind}, rank {config.markov_rank}) gives way to a fresh one",
            error=True,
        )
    return with_markov(drafter, kind, options.markov_rank, width, seed)


def markov_kind(options: DrafterConfig) -> tuple[str, int]:
    """`markov` and `markov_width` of the config."""
    kind = OLD_NAMES.get(options.markov or "silu", options.markov or "silu")
    kind = "" if kind == "silu" or not options.markov_rank else kind
    return kind, options.markov_width if kind == "mlp" else 0


def _check_rank(target: Target, rank: int) -> None:
    if rank > target.hidden_size:
        raise UserError(f"drafter.markov_rank={rank}: at most {target.hidden_size}, the target's width")


def from_target(
    target: Target, options: DrafterConfig, draft_vocab: Tensor | None, seed: int = 0
) -> BlockDrafter:
    """A fresh drafter for `target` after the recipe's drafter group, by default starting from the target's layers.

    Raises:
        UserError: an option that does not fit the target.
    """
    config = block_config(target, options, draft_vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = BlockDrafter(config, target, draft_vocab)
        initialise(drafter, target, options.init_from_target)
    return drafter.to(target.device)


def block_config(target: Target, options: DrafterConfig, draft_vocab: Tensor | None) -> BlockConfig:
    """The architecture of a fresh block drafter. Raises UserError for an option that does not fit the target."""
    shared = options.context == "shared_kv"
    layers = options.layers
    if layers > target.num_layers:
        raise UserError(f"drafter.layers={layers}: target {target.spec!r} has {target.num_layers} layers")
    _check_rank(target, options.markov_rank)
    markov, markov_width = markov_kind(options)
    rotaries: list[Rotary] = []
    if shared:
        chosen, rotaries = shared_keys(target, options)
        shape = target.anatomy.shapes[chosen[0]]
    else:
        chosen = named_layers(target, options.target_layers) or tap_layers(target.num_layers, options.taps)
        check_taps(target, chosen)
        shape = own_shape(target)
    if shared and len(chosen) != layers:
        raise UserError(f"drafter.target_layers names {len(chosen)} layers for drafter.layers={layers}")
    assert shape is not None
    if (not shared or all(r.full(shape.key) and r.inv_freq for r in rotaries)) and own_tables(
        target, shape.key, rotaries
    ):
        written: list[Rotary] = []  # by the target's own module
    else:
        written = list(dict.fromkeys(rotaries)) or [plain_rotary(shape.key, target.rope_theta)]
        written = rotaries if len(written) > 1 else written
    return BlockConfig(
        context=options.context,
        block_size=options.block_size,
        block_layout=options.block_layout or "anchor_first",
        target_layer_ids=chosen,
        init_layer_ids=chosen if shared else start_layers(target, layers),
        hidden_size=target.hidden_size,
        intermediate_size=inner_size(target),
        num_attention_heads=target.num_heads if target.num_heads % shape.heads == 0 else shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.key,
        rms_norm_eps=norm_eps(target),
        hidden_act=activation(target),
        vocab_size=target.vocab_size,
        mask_token_id=mask_token(target) if options.mask_token_id is None else options.mask_token_id,
        num_target_layers=target.num_layers,
        rope_theta=target.rope_theta,
        target=target.spec,
        target_sha256=target.hash,
        qk_norm=not shared,
        attention_bias=has_attention_bias(target),
        draft_vocab_size=0 if draft_vocab is None else len(draft_vocab),
        markov_rank=options.markov_rank,
        markov=markov,
        markov_width=markov_width,
        convolution=options.convolution,
        self_conditioning=options.self_conditioning,
        confidence_head=options.confidence_head,
        value_dim=0 if shape.value == shape.key else shape.value,
        rotary=[rotary_entry(r) for r in written],
        places=any(not r.inv_freq for r in written),
    )


# ---- standalone diffusion drafters ----


def make_standalone(target: Target, options: DrafterConfig, seed: int = 0) -> DiffusionDrafter:
    """A standalone drafter after the recipe's drafter group: `init` as it was saved or published, else a fresh one.

    Raises:
        UserError: an option that does not fit the target.
    """
    if options.init is not None:
        try:
            drafter = load_standalone(options.init, target, attention_backend=options.attention_backend)
        except UserError as error:
            raise UserError(f"drafter.init: {error}") from None
        if type(drafter.network) is not {"ddit": DDiT, "masked_lm": MaskedLM}[options.kind]:
            raise UserError(f"drafter.init={options.init!r} is not of drafter.kind={options.kind}")
        config = replace(drafter.config, block_size=options.block_size, window=options.window)
        drafter = DiffusionDrafter(drafter.network, config, target)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = _fresh_network(target, options)
        config = DiffusionConfig(
            block_size=options.block_size,
            vocab_size=target.vocab_size,
            graph=options.graph,
            schedule={"name": options.schedule},
            # a language model's logits are no log-scores: their sum is far from 1
            prediction="logits" if options.kind == "masked_lm" else options.prediction,
            window=options.window,
            target=target.spec,
            target_sha256=target.hash,
            network=architecture(network),
        )
        drafter = DiffusionDrafter(network, config, target)
    if options.lora_rank:
        if not isinstance(drafter.network, MaskedLM):
            raise UserError("drafter.lora_rank needs drafter.kind=masked_lm")
        with_lora(drafter.network, options.lora_rank, lora_alpha(options), options.lora_targets, seed)
    return drafter.to(target.device)


def lora_alpha(options: DrafterConfig) -> float:
    """The scale of low-rank updates."""
    return 2.0 * options.lora_rank if options.lora_alpha is None else options.lora_alpha


def _fresh_network(target: Target, options: DrafterConfig) -> DDiT | MaskedLM:
    if options.kind == "masked_lm":
        layers = first_layers(target, options)
        mask = mask_token(target) if options.mask_token_id is None else options.mask_token_id
        return adapt(
            target, layers, mask, attention=options.attention, share_embedding=options.share_embedding
        )
    absorbing = options.graph == "absorbing"
    return DDiT(
        DDiTConfig(
            vocab_size=target.vocab_size + absorbing,
            hidden_size=options.hidden_size,
            n_blocks=options.layers,
            n_heads=options.heads,
            cond_dim=options.cond_dim,
            dropout=options.dropout,
            time_input=options.time_input,
            norm_bias=options.time_input == "none",
            scale_by_sigma=absorbing and options.prediction == "log_score" and options.time_input != "none",
            attention=options.attention,
        ),
        options.attention_backend,
    )


# ---- autoregressive drafters ----


def make_causal(target: Target, options: DrafterConfig) -> CausalDrafter:
    """A drafter after the recipe's drafter group: `init`, any causal LM over the target's vocabulary, or the target's layers.

    Raises:
        UserError: a layer, vocabulary or architecture that does not fit.
    """
    layers = first_layers(target, options)
    embedding_VD, head_VD = target.embedding_VD, target.head_weight_VD
    if options.init is not None:
        start = load_target(
            options.init,
            "float32",
            str(target.device),
            fast=False,
            trust_remote_code=target.trust_remote_code,
        )
        if start.vocab_size != target.vocab_size:
            raise UserError(
                f"drafter.init={options.init!r} has a vocabulary of {start.vocab_size}, target {target.spec!r} has "
                f"{target.vocab_size}"
            )
        model, layers = start.model.requires_grad_(True), []
        if not _share_vocabulary(start, target):
            embedding_VD, head_VD = start.embedding_VD, start.head_weight_VD
    else:
        start = _own_layers_alone(target, layers)
        model = start.model.requires_grad_(True)
    where = f"target {target.spec!r}" if options.init is None else f"drafter.init={options.init!r}"
    served_LV = None if type(model).__name__ in BASES else first_tokens_logits(start)
    c = model.config
    config = CausalConfig(
        block_size=options.block_size,
        vocab_size=target.vocab_size,
        layers=layers,
        target=target.spec,
        target_sha256=target.hash,
        network={"base": type(model).__name__, "hidden_size": c.hidden_size, "layers": c.num_hidden_layers},
    )
    drafter = CausalDrafter(model, embedding_VD, head_VD, config, target).to(target.device)
    if served_LV is not None:
        check_served(drafter, served_LV, where)
    return drafter


def _own_layers_alone(target: Target, layers: list[int]) -> Target:
    """A model that has these layers of the target's alone. Raises UserError where there can be none."""
    try:
        own = own_layers(target, layers)
        base, config = own.base, own.config
        config.architectures = [base]
        quiet_loading()
        model, found = getattr(transformers, base).from_pretrained(
            None,
            config=config,
            state_dict=own.tensors,
            dtype=torch.float32,
            attn_implementation=register() if base in BASES else OWN,
            output_loading_info=True,
        )
        if lacking := sorted(found["missing_keys"]):
            raise NotImplementedError(f"layers {layers} alone lack {lacking[0]!r}")
        model.to(target.device)
        if base in BASES:
            return Target(model, target.tokenizer, target.spec, fast=False)
        return proven(model, target.tokenizer, target.spec, fast=False)
    except Exception as error:  # what a model of fewer layers meets has no common class
        raise refused(f"target {target.spec!r}", "autoregressive", error) from None


def _share_vocabulary(one: Target, other: Target) -> bool:
    """Whether both have the same embedding and head, as a drafter that was made here has its target's."""
    pairs = ((one.embedding_VD, other.embedding_VD), (one.head_weight_VD, other.head_weight_VD))
    return all(a.shape == b.shape and torch.equal(a.float(), b.float()) for a, b in pairs)
