"""Block drafters in the layouts of DFlash (arXiv 2602.06036), written: its own (vLLM, SGLang, the
`dflash` package), the speculators package's, and transformers' assistant
(`speculation_type="dflash"`, since 5.17). Fill-in blocks of Qwen3 layers, no Markov head. Writers
raise UserError for a drafter that the format can't hold."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.formats.kinds import ASSISTANT
from specalign.formats.rotary import write_rotary
from specalign.formats.tensors import EMBEDDING, NAMES
from specalign.lm.inspection.parts import embedding_scale, embeds_rows
from specalign.models.block import BlockDrafter

WHOLE_VOCABULARY = (
    "the drafter was trained over a part of the vocabulary, and its engine drafts over the "
    "target's whole one"
)
_NO_ASSISTANT = (
    "vocab_size", "attention_bias", "tie_word_embeddings", "num_target_layers", "is_causal",
)  # fmt: skip
"""Keys that transformers' assistant does not have."""


@dataclass
class Exported:
    """What a folder holds. notes: for the user; files: further text files, path → content."""

    config: JsonObject
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def make_dflash(drafter: BlockDrafter, name: str = "dflash") -> Exported:
    """DFlash's own folder. `name`: of the format, for errors."""
    check_fits(drafter, name, layout="fill_in", adds_bias=name == "dflash")
    nested: JsonObject = {
        "mask_token_id": drafter.config.mask_token_id,
        "target_layer_ids": list(drafter.config.target_layer_ids),
    }
    scale = embedding_scale(drafter.target)
    if scale != 1:
        nested["input_embedding_scale"] = scale
    layers = {**qwen3_config(drafter), **taps_config(drafter)}
    config = {"architectures": ["DFlashDraftModel"], **layers, "dflash_config": nested}
    made = Exported(config, published_tensors(drafter))
    add_draft_vocabulary(made, drafter)
    add_scaled_embedding(made, drafter)
    return made


def make_speculators(drafter: BlockDrafter) -> Exported:
    """The folder of the speculators package."""
    check_fits(drafter, "speculators", layout="fill_in")
    c, target = drafter.config, drafter.target
    inner = qwen3_config(drafter)
    architectures = getattr(target.config, "architectures", None) or [type(target.model).__name__]
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": inner,
        "draft_vocab_size": drafter.draft_size,
        "block_size": c.rows,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],  # 0 is the embedding
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # else vLLM runs every layer causally
        "dtype": inner.pop("dtype"),
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.block_size}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": c.target, "architectures": list(architectures)},
        },
    }
    made = Exported(config, published_tensors(drafter))
    add_draft_vocabulary(made, drafter)
    if drafter.draft_vocab is not None:
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[drafter.draft_vocab.cpu()] = True
        made.tensors["t2d"] = known
    add_scaled_embedding(made, drafter)
    return made


def make_assistant(drafter: BlockDrafter) -> Exported:
    """The assistant model that transformers opens itself."""
    check_fits(drafter, "transformers", layout="fill_in", biases=False, adds_bias=True)
    config = {
        **qwen3_config(drafter),
        **taps_config(drafter),
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": ASSISTANT,
        "sliding_window": drafter.target.context_limit,  # required, although no layer slides
    }
    config = {key: value for key, value in config.items() if key not in _NO_ASSISTANT}
    theirs = {ours: name for name, ours in NAMES.items()}
    tensors = {theirs.get(name, name): t for name, t in published_tensors(drafter).items()}
    return Exported(config, tensors, [WHOLE_VOCABULARY] if drafter.config.draft_vocab_size else [])


# ---- what formats can't hold ----


def check_fits(
    drafter: BlockDrafter,
    name: str,
    layout: str = "",
    markov: Container[str] = (),
    markov_options: str = "",
    biases: bool = True,
    adds_bias: bool = False,
) -> None:
    """Raises UserError naming all training options that the format `name` needs, or what no option
    changes.

    Args:
        layout: the only block layout; empty = either. markov: the kinds of Markov heads that the
            format holds; markov_options: the values of `drafter.markov` that train them. biases:
            whether attention may have them. adds_bias: whether the engine adds the output head's
            bias to drafts, which training does not.
    """
    c, target = drafter.config, drafter.target
    kind, block = c.markov_kind, c.block_layout
    head = f"drafter.markov={markov_options}" if markov_options else "drafter.markov_rank=0"
    rules = (
        (c.context == "taps", f"drafter.context={c.context} is of no engine's format",
         "drafter.context=taps (recipe=taps)"),
        (biases or not c.attention_bias, "the format's attention has no biases",
         "drafter.attention_bias=false"),
        (layout in ("", block), f"the format's blocks are {layout} and this drafter's {block}",
         f"drafter.block_layout={layout}"),
        (not kind or kind in markov, f"the format has no Markov head of the kind {kind!r}", head),
        (not c.convolution, "the format has no drafter.convolution", "drafter.convolution=false"),
    )  # fmt: skip
    whys = [why for fits, why, _ in rules if not fits]
    options = [option for fits, _, option in rules if not fits]
    if whys:
        raise UserError(f"--format {name}: {', '.join(whys)}; train with {' and '.join(options)}")
    check_last_layer(drafter, name)
    bias = target.head_bias_V
    why = ""
    if c.value_dim or not c.qk_norm or c.places:
        why = "its layers are Qwen3's, with QK-norm and rotary positions"
    elif not embeds_rows(target):
        why = f"its target {c.target!r} norms embeddings, and engines' drafters do not"
    elif adds_bias and bias is not None and bool(bias.any()):
        why = f"the output head of {c.target!r} has a bias, which the engine would add to drafts"
    if why:
        raise UserError(f"--format {name}: {why}")
    write_rotary(drafter, name)


def check_last_layer(drafter: BlockDrafter, name: str) -> None:
    """Raises UserError if the target's last layer is tapped: transformers gives it after the final
    norm, engines before."""
    last = drafter.target.num_layers - 1
    if drafter.config.context == "taps" and last in drafter.config.target_layer_ids:
        why = f"layer {last} is the target's last, to which engines apply no norm"
        raise UserError(f"--format {name}: {why}; train with drafter.target_layers below it")


# ---- parts ----


def qwen3_config(drafter: BlockDrafter) -> JsonObject:
    """The layers as a Qwen3 config."""
    c, layers = drafter.config, len(drafter.config.init_layer_ids)
    rope = write_rotary(drafter)
    return {
        "model_type": "qwen3",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.hidden_act,
        "rms_norm_eps": c.rms_norm_eps,
        "attention_bias": c.attention_bias,
        "attention_dropout": 0.0,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": drafter.target.context_limit,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "layer_types": ["full_attention"] * layers,
        "is_causal": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def taps_config(drafter: BlockDrafter) -> JsonObject:
    """Blocks and taps: layer i's output is transformers' hidden_states[i + 1]."""
    c = drafter.config
    return {
        "block_size": c.rows,
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.target_layer_ids),
        "num_target_layers": c.num_target_layers,
    }


def published_tensors(drafter: BlockDrafter) -> dict[str, Tensor]:
    """Layers, norms and projection, whose names are the published ones."""
    heads = ("markov.", "confidence.")
    found = {n: p.detach() for n, p in drafter.named_parameters() if not n.startswith(heads)}
    if drafter.config.attention_bias:  # Qwen3's option adds one to this projection too
        for i, layer in enumerate(drafter.blocks):
            weight = layer.self_attn.o_proj.weight
            found[f"layers.{i}.self_attn.o_proj.bias"] = weight.new_zeros(weight.shape[0])
    return found


def add_draft_vocabulary(made: Exported, drafter: BlockDrafter) -> None:
    """Add the head's rows of a draft vocabulary, and `d2t`: token − row of each."""
    vocab = drafter.draft_vocab
    if vocab is not None:
        made.config["draft_vocab_size"] = len(vocab)
        made.tensors["d2t"] = vocab - torch.arange(len(vocab), device=vocab.device)
        made.tensors["lm_head.weight"] = drafter.head_weight_VdD


def embed_vocabulary(drafter: BlockDrafter) -> Tensor:
    """The target's input embeddings as it reads them, (V, D)."""
    tokens = torch.arange(drafter.config.vocab_size, device=drafter.norm.weight.device)
    return drafter.target.embed(tokens).detach()


def add_scaled_embedding(made: Exported, drafter: BlockDrafter) -> None:
    """Add Gemma's scaled input embeddings, which vLLM and speculators would not scale."""
    if embedding_scale(drafter.target) != 1:
        made.tensors[EMBEDDING] = embed_vocabulary(drafter)
