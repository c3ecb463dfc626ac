"""The recipe's keys of the drafter and its objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from align.config.option import Group, option

LOSS_NAMES = (
    "cross_entropy",
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "lk",
    "first_error",
    "streak",
    "confidence",
)


PARTS = {
    "markov": "markov.",
    "convolution": "_conv.",
    "self_conditioning": "estimate.",
    "confidence": "confidence.",
}
"""Parts of a block drafter that may have a learning rate of their own, and what their weights' names hold."""


@dataclass
class DrafterConfig(Group):
    """The network that drafts."""

    kind: Literal["block", "ddit", "masked_lm", "autoregressive"] = option(
        "block",
        "block = target-conditioned block diffusion; standalone: ddit = SEDD's and MDLM's network, masked_lm = a decoder "
        "LM under another mask; autoregressive = some of the target's layers as a small causal LM. auto = the kind of drafter.init",
    )
    context: Literal["shared_kv", "taps"] = option("shared_kv", "how the block drafter sees the context")
    init: str | None = option(
        None,
        "drafter folder, published checkpoint or hub id to start from; its architecture stays, and a note says which keys of the "
        "recipe that passes over",
    )
    block_size: int = option(4, "K: tokens drafted in one pass", low=1, high=64)
    block_layout: Literal["anchor_first", "fill_in"] | None = option(
        None,
        "block: the rows that draft. anchor_first = K rows, row k drafts token k+1 (DSpark); fill_in = K+1 rows, each mask drafts "
        "the token in its own place (DFlash: what serving engines load); null = anchor_first, or what drafter.init has",
    )
    layers: int = option(2, "drafter layers", low=1, high=1000)
    target_layers: list[int] | None = option(
        None,
        "target layers shared (one for each drafter layer), tapped (taps) or started from (masked_lm, autoregressive); "
        "-1 = the last one, null = chosen",
    )
    taps: int = option(5, "tapped layers when target_layers is null (taps)", low=1, high=1000)
    draft_vocab: int = option(8192, "size of the draft vocabulary, the commonest tokens; 0 = all", low=0)
    init_from_target: bool = option(True, "start from the target's layers")
    markov_rank: int = option(
        192,
        "rank of the bias from the token before; 0 = independent positions. Any other than 192 replaces what drafter.init has, fresh, "
        "and 0 leaves it out",
        low=0,
        high=2**16,
    )
    markov: Literal["silu", "tanh", "linear", "mlp", "vanilla", "gated", "mixed", "table"] | None = option(
        None,
        "block: how that bias is made. silu, tanh = one layer over hidden state and embedding, mlp = two, linear = the embedding "
        "alone, vanilla = a row for each token, gated = the same times a gate (mixed, table: silu's and vanilla's names of old). "
        "DSpark's engines serve linear and vanilla (vLLM), tanh and gated (SGLang). null = silu, or what drafter.init has; another "
        "kind, or a kind and another rank, replaces that, fresh",
    )
    markov_width: int = option(
        0, "width of the first layer of drafter.markov=mlp; 0 = twice the rank", low=0, high=2**16
    )
    attention_bias: bool | None = option(
        None,
        "block: biases of the attention's projections; null = as the target's layers have them. transformers' and llama.cpp's "
        "drafters have none (decode.export)",
    )
    convolution: bool = option(
        False,
        "block: two-tap convolutions around attention and feed-forward; they start as the identity, so that drafter.init drafts "
        "as before",
    )
    self_conditioning: bool = option(
        False,
        "block: a second pass that sees the first one's estimates; half of the blocks train without. It starts without effect, so "
        "that drafter.init drafts as before",
    )
    confidence_head: bool = option(
        False,
        "block: a head that predicts each position's acceptance (objective.terms.confidence trains it)",
    )
    train: Literal["all", "confidence_head"] = option("all", "block: what is trained; the rest is frozen")
    mask_token_id: int | None = option(
        None, "row of the target's embedding used as mask; null = an unused one", low=0
    )
    attention: Literal["prefix_causal", "full"] = option(
        "prefix_causal",
        "standalone: what a clean prefix sees; prefix_causal = its past, so that its keys are cached exactly; full = as published",
    )
    attention_backend: Literal["sdpa", "flash_attn"] = option(
        "sdpa",
        "ddit: flash_attn where it is installed and the attention is full (GPU, half precision); never silently",
    )
    window: int = option(512, "full attention: clean tokens shown before a block", low=1, high=2**24)
    hidden_size: int = option(256, "ddit: width", low=8, high=2**16)
    heads: int = option(4, "ddit: attention heads", low=1, high=2**16)
    cond_dim: int = option(128, "ddit: width of the time conditioning", low=1, high=2**16)
    dropout: float = option(0.0, "ddit: dropout while training", low=0, high=0.9)
    time_input: Literal["sigma", "zero", "none"] = option(
        "sigma", "ddit: conditioned on the noise (SEDD), on zero (MDLM), or without adaLN (RADD)"
    )
    graph: Literal["absorbing", "uniform"] = option("absorbing", "ddit: what noise does to a token")
    schedule: Literal["loglinear", "geometric", "cosine"] = option("loglinear", "standalone: noise over time")
    prediction: Literal["log_score", "logits"] = option(
        "log_score", "standalone: what the network's output is: SEDD's log-score or MDLM's logits"
    )
    share_embedding: bool = option(
        True, "masked_lm: the target's embedding and head, frozen and not stored, instead of copies"
    )
    lora_rank: int = option(
        0,
        "masked_lm, block with init: rank of low-rank updates, the rest frozen; 0 = train everything",
        low=0,
        high=2**16,
    )
    lora_alpha: float | None = option(None, "their scale; null = twice the rank", above=0)
    lora_targets: list[str] = option(
        ["q_proj", "k_proj", "v_proj", "o_proj"], "endings of the names of the linear layers that get them"
    )

    @property
    def standalone(self) -> bool:
        """Whether it reads tokens alone: a network of its own, or a decoder LM under another mask."""
        return self.kind in ("ddit", "masked_lm")


@dataclass
class ObjectiveConfig(Group):
    """The loss."""

    terms: dict[str, float] = option(
        {"forward_kl": 1.0}, f"loss name: weight; names: {', '.join(LOSS_NAMES)}", above=0
    )
    weighting: Literal["d_pace", "exponential", "normalised", "uniform"] = option(
        "d_pace", "weights of the K positions; normalised = exponential ones over their sum in the block"
    )
    decay: float = option(4.0, "decay of the exponential and normalised weights, in positions", above=0)
    d_pace_alpha: float = option(0.5, "alpha of the D-PACE weights", low=0, high=1)
    temperature: float = option(1.0, "temperature of p in the divergences", above=0)
    prefix_decay: float = option(
        0.0,
        "block: beta; a block shows its first j tokens with a chance ~ beta^j, the loss counts those after them; 0 = never",
        low=0,
        high=1,
    )
    chunk_rows: int = option(2048, "rows of the head computed at a time", low=1)
    diffusion: Literal["score_entropy", "masked_nll"] = option(
        "score_entropy", "standalone: SEDD's denoising score entropy, or MDLM's bound (absorbing only)"
    )
    distillation: float = option(
        1.0, "standalone, stage=calibrate: λ, the weight of the terms beside the diffusion loss", low=0
    )
    distillation_warmup: int = option(0, "steps over which λ rises from 0", low=0)
    times: Literal["low_discrepancy", "antithetic", "uniform", "count"] = option(
        "low_discrepancy",
        "standalone: how the blocks' times are drawn; count = by the number of masks, least noise (absorbing only)",
    )
    least_time: float = option(1e-3, "standalone: the earliest time", above=0, high=1)
    annealing: int = option(
        0,
        "standalone, without drafter.init: steps over which noisy tokens come to see those right of them (0 = from the start)",
        low=0,
    )
    block_lengths: list[float] = option(
        [], "standalone: chances of the block lengths 1..K that decoding uses; empty = K always", low=0
    )
