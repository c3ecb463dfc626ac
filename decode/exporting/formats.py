"""Block drafters in the folder formats of other engines: config.json and tensors under published names.

| format | read by | block | Markov and confidence head | draft vocabulary |
|---|---|---|---|---|
| `dflash` | vLLM, SGLang, the `dflash` package | fill-in | no | vLLM: `d2t`, `lm_head.weight` |
| `transformers` | transformers' own assistant (`speculation_type="dflash"`) | fill-in | no | the target's whole one |
| `speculators` | the `speculators` package, vLLM | fill-in | no | `d2t`, `t2d`, `lm_head.weight` |
| `dspark` | vLLM, SGLang | anchor-first | yes | with vLLM's head `d2t`, `lm_head.weight`; with SGLang's the whole one |
| `custom_generate` (`drop_in.py`) | `generate(custom_generate=…)` of transformers, with source of its own | both | yes | yes |

DFlash: arXiv 2602.06036; DSpark: arXiv 2607.05147. What a format can't hold is refused, with the key that trains what it can.
"""

from __future__ import annotations

import torch

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.checkpoints.dspark import KINDS, dspark_tensors
from align.target.inspection.parts import embedding_scale, embeds_rows
from decode.exporting.content import (
    add_pruned,
    published_tensors,
    qwen3_config,
    rope_parameters,
    suit_vllm,
    taps_config,
)
from decode.exporting.folder import Exported


def dflash(drafter: BlockDrafter, name: str = "dflash") -> Exported:
    """DFlash's own folder. `name`: of the format that was asked for.

    Raises:
        UserError: a drafter that the format can't hold.
    """
    _check_plain(drafter, name)
    made = Exported(
        {"architectures": ["DFlashDraftModel"], **qwen3_config(drafter), **taps_config(drafter)},
        published_tensors(drafter),
        _left_out(drafter),
    )
    made.config["dflash_config"] = {
        "mask_token_id": drafter.config.mask_token_id,
        "target_layer_ids": list(drafter.config.target_layer_ids),
    }
    if (scale := embedding_scale(drafter.target)) != 1:
        made.config["dflash_config"]["input_embedding_scale"] = scale
    add_pruned(
        made, drafter, "vLLM reads them; SGLang and the dflash package draft over the whole vocabulary"
    )
    suit_vllm(made, drafter)
    return made


def assistant(drafter: BlockDrafter) -> Exported:
    """The assistant model that transformers opens itself, since 5.17.

    Raises:
        UserError: a drafter that the format can't hold.
    """
    c = drafter.config
    _check_plain(drafter, "transformers", no_biases(c, "the format's attention has no biases"))
    config = {
        **qwen3_config(drafter),
        **taps_config(drafter),
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "sliding_window": drafter.target.context_limit,  # a number is asked for; no layer slides
    }
    for name in ("vocab_size", "attention_bias", "tie_word_embeddings", "num_target_layers", "is_causal"):
        del config[name]
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    made = Exported(
        config, {names.get(n, n): t for n, t in published_tensors(drafter).items()}, _left_out(drafter)
    )
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
    inner = qwen3_config(drafter)
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
        published_tensors(drafter),
        _left_out(drafter),
    )
    add_pruned(made, drafter)
    if drafter.draft_vocab is not None:
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[drafter.draft_vocab.cpu()] = True
        made.tensors["t2d"] = known
    suit_vllm(made, drafter)
    return made


def dspark(drafter: BlockDrafter, name: str = "dspark") -> Exported:
    """DSpark's folder. `name`: of the format that was asked for.

    Raises:
        UserError: a drafter that the format can't hold.
    """
    c = drafter.config
    _check_layers(
        drafter,
        name,
        (
            c.fill_in and name == "dspark",  # llama.cpp reads either from the file
            "the format's blocks are anchor-first and this drafter's fill-in",
            "drafter.block_layout=anchor_first",
        ),
        (
            c.markov_kind not in ("", *KINDS),
            f"the format has no Markov head of the kind drafter.markov={c.markov_kind}",
            "drafter.markov=tanh, linear, vanilla or gated",
        ),
    )
    everything = torch.arange(c.vocab_size, device=drafter.norm.weight.device)
    embedding = drafter.target.embed(everything).detach()
    confidence = None if drafter.confidence is None else drafter.confidence.out
    head = dspark_tensors(drafter.markov, embedding, drafter.draft_size, confidence, c.confidence_input)
    made = Exported(
        {
            "architectures": ["Qwen3DSparkModel"],
            **qwen3_config(drafter),
            **taps_config(drafter),
            "sample_from_anchor": not c.fill_in,
            "markov_rank": head.rank,
            "markov_head_type": head.kind,
            "enable_confidence_head": confidence is not None,
            "confidence_head_with_markov": confidence is not None and c.confidence_input != "hidden",
        },
        published_tensors(drafter) | head.tensors,
    )
    if head.kind == "vanilla":
        add_pruned(made, drafter, "vLLM reads them; SGLang takes whole vocabularies alone")
    else:
        made.notes.append(f"vLLM serves vanilla heads alone, this one is {head.kind!r}: SGLang's")
        if (vocab := drafter.draft_vocab) is not None:  # which takes whole vocabularies alone
            basis_VdR = made.tensors[_BASIS]
            made.tensors[_BASIS] = basis_VdR.new_zeros(c.vocab_size, head.rank).index_copy(
                0, vocab, basis_VdR
            )
            made.notes.append(f"{_WIDENED}; its Markov head leaves the logits of the others as they are")
    suit_vllm(made, drafter)
    return made


_BASIS = "markov_head.markov_w2.weight"
_WIDENED = "the drafter was trained over a part of the vocabulary; its engine holds none, so it drafts over the target's whole one"


def _check_plain(drafter: BlockDrafter, name: str, *more: Unfit) -> None:
    """What all readers of DFlash's layout ask for."""
    _check_layers(
        drafter,
        name,
        *more,
        (
            not drafter.config.fill_in,
            "the format's blocks are fill-in and this drafter's anchor-first",
            "drafter.block_layout=fill_in",
        ),
        (drafter.markov is not None, "the format has no Markov head", "drafter.markov_rank=0"),
    )
    bias = drafter.target.head_bias_V
    if name in ("dflash", "transformers") and bias is not None and bool(bias.any()):
        raise UserError(
            f"--format {name}: the output head of its target {drafter.config.target!r} has a bias, which transformers and the dflash "
            "package add to drafts, and this drafter was trained without it"
        )


def _left_out(drafter: BlockDrafter) -> list[str]:
    """What DFlash's layout has no place for and drafts do not need."""
    said = "its confidence head is left out: the format has none, and all drafts of a block are proposed"
    return [] if drafter.confidence is None else [said]


Unfit = tuple[bool, str, str]
"""Whether it is so, why the format can't hold it, and what to train with instead."""


def check_trained(drafter: BlockDrafter, name: str, *more: Unfit) -> None:
    """Raises UserError with all keys at once that would have to be trained otherwise, so that none is left to refuse next."""
    c = drafter.config
    found: tuple[Unfit, ...] = (
        (
            c.context != "taps",
            f"drafter.context={c.context} is of no engine's format",
            "drafter.context=taps (recipe=taps)",
        ),
        *more,
        (c.convolution, "the format has no drafter.convolution", "drafter.convolution=false"),
        (
            c.self_conditioning,
            "the format has no drafter.self_conditioning",
            "drafter.self_conditioning=false",
        ),
        _last_layer(drafter),
    )
    if wrong := [(why, key) for there, why, key in found if there]:
        whys, keys = zip(*wrong, strict=True)
        raise UserError(f"--format {name}: {', '.join(whys)}; train with {' and '.join(keys)}")


def no_biases(config: BlockConfig, why: str) -> Unfit:
    """For formats whose attention has none. Qwen2's has, and drafters for it start from that."""
    return config.attention_bias, why, "drafter.attention_bias=false"


def _check_layers(drafter: BlockDrafter, name: str, *more: Unfit) -> None:
    check_trained(drafter, name, *more)
    c = drafter.config
    if not embeds_rows(drafter.target):
        raise UserError(
            f"--format {name}: its target {c.target!r} norms embeddings, and engines' drafters read the rows without that"
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
            f"--format {name}: the format's layers are Qwen3's and this drafter's have {what}; no engine's format holds them"
        )
    rope_parameters(drafter, name)


def check_last_layer(drafter: BlockDrafter, name: str) -> None:
    """Raises UserError where it is tapped."""
    there, why, key = _last_layer(drafter)
    if there:
        raise UserError(f"--format {name}: {why}; train with {key}")


def _last_layer(drafter: BlockDrafter) -> Unfit:
    last, c = drafter.target.num_layers - 1, drafter.config
    return (
        c.context == "taps" and last in c.target_layer_ids,
        f"layer {last} is the target's last, which transformers gives with its norm and engines without",
        "drafter.target_layers that end below it",
    )
