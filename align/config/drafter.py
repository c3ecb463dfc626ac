"""The recipe's sections `drafter` and `objective`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from align.config.option import Section, option, require
from specalign.common.errors import nearest

LOSS_NAMES = (
    "cross_entropy", "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "lk",
    "first_error", "streak", "confidence",
)  # fmt: skip


@dataclass
class DrafterConfig(Section):
    """The network that drafts."""

    SECTION = "drafter"

    kind: Literal["block", "ddit", "masked_lm", "autoregressive"] = option(
        "block",
        "block = target-conditioned block diffusion; standalone: ddit = SEDD's and MDLM's network, "
        "masked_lm = a decoder LM under another mask; autoregressive = some of the target's layers "
        "as a small causal LM; auto = the kind of drafter.init",
    )
    context: Literal["shared_kv", "taps"] = option(
        "shared_kv", "how the block drafter sees the context"
    )
    init: str | None = option(
        None, "drafter folder, published checkpoint or hub id to start from, whose sizes are kept"
    )
    block_size: int = option(4, "K: tokens drafted in one pass", low=1, high=64)
    block_layout: Literal["anchor_first", "fill_in"] | None = option(
        None,
        "block: anchor_first = K rows, row k drafts token k+1 (DSpark); fill_in = K+1 rows, each "
        "mask drafts the token in its own place (DFlash: what serving engines load); null = "
        "anchor_first, or what drafter.init has",
    )
    layers: int = option(2, "drafter layers", low=1, high=1000)
    target_layers: list[int] | None = option(
        None,
        "target layers shared (one per drafter layer), tapped (taps) or started from (masked_lm, "
        "autoregressive); -1 = the last one, null = chosen",
    )
    taps: int = option(5, "tapped layers when target_layers is null (taps)", low=1, high=1000)
    draft_vocab: int = option(8192, "draft vocabulary: the commonest tokens; 0 = all", low=0)
    init_from_target: bool = option(True, "start from the target's layers")
    markov_rank: int = option(
        192,
        "rank of the bias from the previous token; 0 = independent positions",
        low=0,
        high=2**16,
    )
    markov: Literal["silu", "tanh", "linear", "vanilla", "gated"] | None = option(
        None,
        "block: form of that bias. silu, tanh = one layer over hidden state and embedding, linear "
        "= the embedding alone, vanilla = a row for each token, gated = the same times a gate. "
        "DSpark's engines serve linear and vanilla (vLLM), tanh and gated (SGLang). null = silu; "
        "a drafter.init keeps its own",
    )
    attention_bias: bool | None = option(
        None, "block: biases of the attention's projections; null = as the target's layers"
    )
    convolution: bool = option(
        False,
        "block: two-tap convolutions around attention and feed-forward, the identity at first",
    )
    confidence_head: bool = option(
        False, "block: a head that predicts each position's acceptance (objective.terms.confidence)"
    )
    train: Literal["all", "confidence_head"] = option(
        "all", "block: trained weights; the rest is frozen"
    )
    mask_token_id: int | None = option(
        None, "row of the target's embedding used as mask; null = an unused one", low=0
    )
    attention: Literal["prefix_causal", "full"] = option(
        "prefix_causal",
        "standalone: what a clean prefix sees; prefix_causal = its past, so that its keys are "
        "cached exactly; full = as published",
    )
    attention_backend: Literal["sdpa", "flash_attn"] = option(
        "sdpa", "ddit: flash_attn needs the package, full attention, a GPU and half precision"
    )
    window: int = option(
        512, "full attention: clean tokens shown before a block", low=1, high=2**24
    )
    hidden_size: int = option(256, "ddit: width", low=8, high=2**16)
    heads: int = option(4, "ddit: attention heads", low=1, high=2**16)
    cond_dim: int = option(128, "ddit: width of the time conditioning", low=1, high=2**16)
    dropout: float = option(0.0, "ddit: dropout while training", low=0, high=0.9)
    time_input: Literal["sigma", "zero", "none"] = option(
        "sigma", "ddit: conditioned on the noise (SEDD), on zero (MDLM), or without adaLN (RADD)"
    )
    graph: str = option("absorbing", "standalone: what noise does to a token: it masks it")
    schedule: Literal["loglinear", "geometric", "cosine"] = option(
        "loglinear", "standalone: noise over time"
    )
    prediction: Literal["log_score", "logits"] = option(
        "log_score", "standalone: the network's output: SEDD's log-score or MDLM's logits"
    )
    share_embedding: bool = option(
        True, "masked_lm: the target's embedding and head, frozen and not stored; else copies"
    )
    lora_rank: int = option(
        0,
        "masked_lm: rank of low-rank updates, the rest frozen; 0 = train everything",
        low=0,
        high=2**16,
    )
    lora_alpha: float | None = option(None, "their scale; null = twice the rank", above=0)
    lora_targets: list[str] = option(
        ["q_proj", "k_proj", "v_proj", "o_proj"], "name endings of the linear layers to update"
    )

    @property
    def standalone(self) -> bool:
        """Whether it reads tokens alone: a network of its own, or a decoder LM under another
        mask."""
        return self.kind in ("ddit", "masked_lm")

    def validate(self) -> None:
        self._validate_kind()
        self._validate_network()

    def _validate_kind(self) -> None:
        is_block, has_init = self.kind == "block", self.init is not None
        block_only = {
            "confidence_head=true": self.confidence_head,
            "convolution=true": self.convolution,
            f"markov={self.markov}": self.markov is not None,
            f"block_layout={self.block_layout}": self.block_layout is not None,
        }
        for name, is_set in block_only.items():
            require(is_block or not is_set, f"drafter.{name} needs drafter.kind=block")
        bias = f"drafter.attention_bias={str(self.attention_bias).lower()}"
        is_fresh = is_block and not has_init
        fresh = f"{bias} needs drafter.kind=block without drafter.init"
        require(self.attention_bias is None or is_fresh, fresh)
        markov = f"drafter.markov={self.markov} needs drafter.markov_rank above 0"
        require(self.markov is None or self.markov_rank > 0, markov)
        if self.train == "confidence_head":
            train = "drafter.train=confidence_head"
            require(self.confidence_head, f"{train} needs drafter.confidence_head=true")
            require(has_init, f"{train} needs drafter.init, a trained drafter: all else is frozen")

    def _validate_network(self) -> None:
        require(
            self.graph == "absorbing",
            f"drafter.graph={self.graph}: such a drafter cannot draft; use drafter.graph=absorbing",
        )
        if self.kind == "ddit":
            require(
                self.init is not None or self.time_input != "none" or self.prediction == "logits",
                "drafter.time_input=none needs drafter.prediction=logits: a log-score depends on "
                "the noise (RADD)",
            )
            require(
                self.hidden_size % (2 * self.heads) == 0,
                f"drafter.hidden_size={self.hidden_size} must be a multiple of twice "
                f"drafter.heads={self.heads}",
            )
        require(
            self.attention_backend == "sdpa" or (self.kind == "ddit" and self.attention == "full"),
            "drafter.attention_backend=flash_attn needs drafter.kind=ddit with "
            "drafter.attention=full",
        )
        require(
            self.lora_rank == 0 or self.kind == "masked_lm",
            "drafter.lora_rank needs drafter.kind=masked_lm",
        )
        if self.target_layers is None:
            return
        require(self.target_layers, "drafter.target_layers must name at least one layer")
        is_shared = self.kind == "block" and self.context == "shared_kv"
        require(
            not is_shared or len(self.target_layers) == self.layers,
            f"drafter.target_layers={self.target_layers} must name "
            f"drafter.layers={self.layers} layers for shared_kv",
        )


@dataclass
class ObjectiveConfig(Section):
    """The loss."""

    SECTION = "objective"

    terms: dict[str, float] = option(
        {"forward_kl": 1.0}, f"loss name: weight; names: {', '.join(LOSS_NAMES)}", above=0
    )
    weighting: Literal["d_pace", "exponential", "normalised", "uniform"] = option(
        "d_pace",
        "weights of the K positions; normalised = exponential weights over their sum in the block",
    )
    decay: float = option(
        4.0, "decay of the exponential and normalised weights, in positions", above=0
    )
    d_pace_alpha: float = option(0.5, "alpha of the D-PACE weights", low=0, high=1)
    temperature: float = option(1.0, "temperature of p in the divergences", above=0)
    prefix_decay: float = option(
        0.0,
        "block: beta; a block shows its first j tokens with probability ~ beta^j, the loss counts "
        "the rest; 0 = never",
        low=0,
        high=1,
    )
    chunk_rows: int = option(2048, "rows of the head computed at a time", low=1)
    diffusion: Literal["score_entropy", "masked_nll"] = option(
        "score_entropy", "standalone: SEDD's denoising score entropy, or MDLM's bound"
    )
    distillation: float = option(
        1.0, "standalone, stage=calibrate: λ, the weight of the terms", low=0
    )
    distillation_warmup: int = option(0, "steps over which λ rises from 0", low=0)
    times: Literal["low_discrepancy", "count"] = option(
        "low_discrepancy",
        "standalone: how the blocks' times are drawn; count = by the number of masks, least noise",
    )
    least_time: float = option(1e-3, "standalone: the earliest time", above=0, high=1)
    annealing: int = option(
        0,
        "standalone, without drafter.init: steps over which noisy tokens gradually attend to the "
        "right (0 = from the start)",
        low=0,
    )
    block_lengths: list[float] = option(
        [], "standalone: probabilities of the block lengths 1..K; empty = K always", low=0
    )

    def validate(self) -> None:
        require(self.terms, f"objective.terms must name at least one loss{nearest('', LOSS_NAMES)}")
        for name in self.terms:
            near = nearest(name, LOSS_NAMES)
            require(name in LOSS_NAMES, f"objective.terms.{name}: unknown loss{near}")
        require(
            not self.block_lengths or sum(self.block_lengths) > 0,
            "objective.block_lengths must not all be 0",
        )
