"""Block drafters in the folder formats of other engines: config.json and tensors under published names.

| format | read by | block | Markov and confidence head | draft vocabulary |
|---|---|---|---|---|
| `dflash` | vLLM, SGLang, the `dflash` package | fill-in | no | vLLM: `d2t`, `lm_head.weight` |
| `transformers` | transformers' own assistant (`speculation_type="dflash"`) | fill-in | no | the target's whole one |
| `speculators` | the `speculators` package, vLLM | fill-in | no | `d2t`, `t2d`, `lm_head.weight` |
| `dspark` | vLLM, SGLang | anchor-first | yes | vLLM: `d2t`, `lm_head.weight` |
| `custom_generate` (`drop_in.py`) | `generate(custom_generate=…)` of transformers, with source of its own | both | yes | yes |

DFlash: arXiv 2602.06036; DSpark: arXiv 2607.05147. What a format can't hold is refused, with the key that trains what it can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.checkpoints.dspark import dspark_tensors
from align.target.inspection.parts import embedding_scale, embeds_rows
from decode.exporting.folder import EMBEDDING, Exported


def dflash(drafter: BlockDrafter, name: str = "dflash") -> Exported:
    """DFlash's own folder. `name`: of the format that was asked for.

    Raises:
        UserError: a drafter that the format can't hold.
    """
    _check_plain(drafter, name)
    made = Exported(
        {"architectures": ["DFlashDraftModel"], **_qwen3(drafter), **_taps(drafter)},
        _tensors(drafter),
        _left_out(drafter),
    )
    made.config["dflash_config"] = {
        "mask_token_id": drafter.config.mask_token_id,
        "target_layer_ids": list(drafter.config.target_layer_ids),
    }
    if (scale := embedding_scale(drafter.target)) != 1:
        made.config["dflash_config"]["input_embedding_scale"] = scale
    _add_pruned(
        made, drafter, "vLLM reads them; SGLang and the dflash package draft over the whole vocabulary"
    )
    _suit_vllm(made, drafter)
    return made


def assistant(drafter: BlockDrafter) -> Exported:
    """The assistant model that transformers opens itself, since 5.17.

    Raises:
        UserError: a drafter that the format can't hold.
    """
    _check_plain(drafter, "transformers")
    c = drafter.config
    if c.attention_bias:
        raise UserError(
            "--format transformers: its layers have no biases, this drafter's have; use --format dflash"
        )
    config = {
        **_qwen3(drafter),
        **_taps(drafter),
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "sliding_window": drafter.target.context_limit,  # a number is asked for; no layer slides
    }
    for name in ("vocab_size", "attention_bias", "tie_word_embeddings", "num_target_layers", "is_causal"):
        del config[name]
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    made = Exported(config, {names.get(n, n): t for n, t in _tensors(drafter).items()}, _left_out(drafter))
    if c.draft_vocab_size:
        made.notes.append(_WIDENED)
    return made


def speculators(drafter: BlockDrafter) -> Exported:
    """The folder of the speculators package.

    Raises:
        UserError: a drafter that the format can't hold.
    """
    _check_plain(drafter, "speculators")
    c, target = drafter.config, drafter.target
    inner = _qwen3(drafter)
    architectures = list(getattr(target.config, "architectures", None) or [type(target.model).__name__])
    made = Exported(
        {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": inner,
            "draft_vocab_size": drafter.draft_size,
            "block_size": c.rows,
            "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],
            "mask_token_id": c.mask_token_id,
            "sample_from_anchor": False,
            "sliding_window_non_causal": True,  # else vLLM runs every layer causal
            "dtype": inner.pop("dtype"),
            "speculators_config": {
                "algorithm": "dflash",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.block_size}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": c.target, "architectures": architectures},
            },
        },
        _tensors(drafter),
        _left_out(drafter),
    )
    _add_pruned(made, drafter)
    if drafter.draft_vocab is not None:
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[drafter.draft_vocab.cpu()] = True
        made.tensors["t2d"] = known
    _suit_vllm(made, drafter)
    return made


def dspark(drafter: BlockDrafter, name: str = "dspark") -> Exported:
    """DSpark's folder. `name`: of the format that was asked for.

    Raises:
        UserError: a drafter that the format can't hold.
    """
    c = drafter.config
    _check_layers(drafter, name)
    if c.fill_in and name == "dspark":  # llama.cpp reads either from the file
        other = "dflash" if drafter.markov is None else "custom_generate"
        raise UserError(
            f"--format dspark: its blocks are anchor-first, this drafter's are not; "
            f"train with drafter.block_layout=anchor_first, or use --format {other}"
        )
    everything = torch.arange(c.vocab_size, device=drafter.norm.weight.device)
    embedding = drafter.target.embed(everything).detach()
    confidence = None if drafter.confidence is None else drafter.confidence.out
    head = dspark_tensors(drafter.markov, embedding, drafter.draft_size, confidence, c.confidence_input)
    made = Exported(
        {
            "architectures": ["Qwen3DSparkModel"],
            **_qwen3(drafter),
            **_taps(drafter),
            "sample_from_anchor": not c.fill_in,
            "markov_rank": head.rank,
            "markov_head_type": head.kind,
            "enable_confidence_head": confidence is not None,
            "confidence_head_with_markov": confidence is not None and c.confidence_input != "hidden",
        },
        _tensors(drafter) | head.tensors,
    )
    if head.kind != "vanilla":
        made.notes.append(f"vLLM serves vanilla heads alone, this one is {head.kind!r}: SGLang's")
    _add_pruned(made, drafter, "vLLM reads them; SGLang takes whole vocabularies alone")
    _suit_vllm(made, drafter)
    return made


_WIDENED = "the drafter was trained over a part of the vocabulary; the format holds none, so it drafts over the target's whole one"


def _check_plain(drafter: BlockDrafter, name: str) -> None:
    """What all readers of DFlash's layout ask for."""
    c = drafter.config
    _check_layers(drafter, name)
    if not c.fill_in:
        raise UserError(
            f"--format {name}: its blocks are fill-in, this drafter's are anchor-first; train with drafter.block_layout=fill_in, "
            "or use --format dspark"
        )
    if drafter.markov is not None:
        raise UserError(
            f"--format {name}: it has no Markov head, this drafter has one; train with drafter.markov_rank=0, "
            "or with drafter.block_layout=anchor_first for --format dspark"
        )


def _left_out(drafter: BlockDrafter) -> list[str]:
    """What DFlash's layout has no place for and drafts do not need."""
    said = "its confidence head is left out: the format has none, and all drafts of a block are proposed"
    return [] if drafter.confidence is None else [said]


def _check_layers(drafter: BlockDrafter, name: str) -> None:
    c = drafter.config
    if c.context != "taps":
        raise UserError(
            f"--format {name}: drafter.context={c.context} is of no engine's format; train with drafter.context=taps "
            "(recipe=smollm2_taps), or --format custom_generate, which holds this one"
        )
    for option in ("convolution", "self_conditioning"):
        if getattr(c, option):
            raise UserError(f"--format {name}: it has no drafter.{option}; train with drafter.{option}=false")
    check_last_layer(drafter, name)
    if not embeds_rows(drafter.target):
        raise UserError(
            f"--format {name}: its target {c.target!r} norms embeddings, and engines' drafters read the rows without that; "
            "use --format custom_generate"
        )
    if c.value_dim or c.places or not c.qk_norm:
        what = (
            "values of another width than keys"
            if c.value_dim
            else "no QK-norm"
            if not c.qk_norm
            else "learned places"
        )
        raise UserError(
            f"--format {name}: its layers are Qwen3's, this drafter's have {what}; no engine's format holds them"
        )
    _rope(drafter, name)


def check_last_layer(drafter: BlockDrafter, name: str) -> None:
    last = drafter.target.num_layers - 1
    if last in drafter.config.target_layer_ids:
        raise UserError(
            f"--format {name}: layer {last} is the target's last, which transformers gives with its norm "
            f"and engines without; train with drafter.target_layers that end below it"
        )


def _rope(drafter: BlockDrafter, name: str) -> dict[str, Any]:
    """`rope_parameters` that turn keys as this drafter's layers do. Raises UserError where the format has none."""
    c, target = drafter.config, drafter.target
    if (published := c.extra.get("rope_parameters")) is not None:  # of the engine that it came from
        return dict(published)
    if c.rotaries:
        plain = _plain_theta(c)
        if plain is None:
            raise UserError(
                f"--format {name}: its keys are rotated whole and in halves, by one base; this drafter's are not (part of a head, "
                "neighbouring pairs or another base in each layer): no engine's format holds them"
            )
        return {"rope_type": "default", "rope_theta": plain}
    found = dict(getattr(target.config, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in found.values()):  # one for each kind of layer
        found = dict(found.get("full_attention") or next(v for v in found.values() if isinstance(v, dict)))
    return {"rope_type": "default", **found, "rope_theta": float(found.get("rope_theta") or c.rope_theta)}


def _plain_theta(config: BlockConfig) -> float | None:
    """The base where every layer rotates whole heads in halves by base^(−2i/d)."""
    one = config.rotaries[0]
    if any(r != one for r in config.rotaries) or not one.full(config.head_dim) or len(one.inv_freq) < 2:
        return None
    theta = one.inv_freq[1] ** (-config.head_dim / 2)
    plain = [theta ** (-2 * i / config.head_dim) for i in range(len(one.inv_freq))]
    fits = all(abs(a / b - 1) < 1e-4 for a, b in zip(one.inv_freq, plain, strict=True))
    return theta if fits else None


def _qwen3(drafter: BlockDrafter) -> dict[str, Any]:
    """The layers as Qwen3's config says them."""
    c, target = drafter.config, drafter.target
    rope, layers = _rope(drafter, "dflash"), len(c.init_layer_ids)
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
        "max_position_embeddings": target.context_limit,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "layer_types": ["full_attention"] * layers,
        "is_causal": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _taps(drafter: BlockDrafter) -> dict[str, Any]:
    """Blocks and tapped layers: id i is what layer i writes, transformers' hidden_states[i + 1]."""
    c = drafter.config
    return {
        "block_size": c.rows,
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.target_layer_ids),
        "num_target_layers": c.num_target_layers,
    }


def _tensors(drafter: BlockDrafter) -> dict[str, Tensor]:
    """Layers, norms and projection: the names are the published ones."""
    heads = ("markov.", "confidence.")
    found = {n: p.detach() for n, p in drafter.named_parameters() if not n.startswith(heads)}
    if drafter.config.attention_bias:  # Qwen3's option puts one on this projection too
        for i, layer in enumerate(drafter.blocks):
            weight = layer.self_attn.o_proj.weight
            found[f"layers.{i}.self_attn.o_proj.bias"] = weight.new_zeros(weight.shape[0])
    return found


def _add_pruned(made: Exported, drafter: BlockDrafter, who: str = "") -> None:
    """A draft vocabulary: the head's rows, and for each of them how far its token lies behind its row."""
    vocab = drafter.draft_vocab
    if vocab is None:
        return
    made.config["draft_vocab_size"] = len(vocab)
    made.tensors["d2t"] = vocab - torch.arange(len(vocab), device=vocab.device)
    made.tensors["lm_head.weight"] = drafter.head_weight_VdD
    if who:
        made.notes.append(f"its draft vocabulary is in d2t and lm_head.weight: {who}")


def _suit_vllm(made: Exported, drafter: BlockDrafter) -> None:
    """What vLLM needs beside, and what it can't serve. Where the target scales its embedding (Gemma), the scaled rows: vLLM and the
    speculators package read a folder's own rows, or else the target's as they stand, and know no scale."""
    c, target = drafter.config, drafter.target
    if (scale := embedding_scale(target)) != 1:
        everything = torch.arange(c.vocab_size, device=drafter.norm.weight.device)
        made.tensors[EMBEDDING] = target.embed(everything).detach()
        made.notes.append(
            f"its target multiplies embeddings by {scale:g}: the rows for it are in {EMBEDDING}, in fp32, for vLLM and the "
            "speculators package, which would read the target's without that"
        )
    if c.hidden_act != "silu":
        made.notes.append(f"its activation is {c.hidden_act}: vLLM and SGLang serve drafters with silu alone")
