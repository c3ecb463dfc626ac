"""The recipe's sections `drafter` and `objective`."""

from dataclasses import dataclass
from typing import Literal

from align.config.option import Section, option, require
from specalign.common.errors import nearest

LOSS_NAMES = (
    "cross_entropy", "forward_kl", "total_variation", "lk", "streak", "confidence",
)  # fmt: skip


@dataclass
class DrafterConfig(Section):
    """The network that drafts."""

    kind: Literal["block", "ddit", "masked_lm", "autoregressive"] = option(
        "block",
        "block reads the target; standalone: ddit = SEDD's and MDLM's network, masked_lm = a "
        "decoder LM with another attention mask; autoregressive = target layers; auto = as "
        "drafter.init",
    )
    context: Literal["shared_kv", "taps"] = option("shared_kv", "how a block reads the context")
    init: str | None = option(
        None, "drafter folder, published checkpoint or hub id to start from; keeps its sizes"
    )
    block_size: int = option(4, "K: tokens drafted in one pass", low=1, high=64)
    block_layout: Literal["anchor_first", "fill_in"] | None = option(
        None,
        "block: anchor_first = K rows, row k drafts token k+1 (DSpark); fill_in = K+1 rows, each "
        "mask drafts its own token (DFlash); null = anchor_first, or as drafter.init",
    )
    layers: int = option(2, "drafter layers", low=1, high=1000)
    target_layers: list[int] | None = option(
        None, "target layers shared (one per layer), tapped or copied; -1 = last, null = chosen"
    )
    taps: int = option(5, "tapped layers when target_layers is null (taps)", low=1, high=1000)
    draft_vocab: int = option(8192, "block: most frequent tokens to draft from; 0 = all", low=0)
    init_from_target: bool = option(True, "start from the target's layers")
    markov_rank: int = option(192, "rank of the previous-token bias; 0 = none", low=0, high=2**16)
    markov: Literal["silu", "tanh", "linear", "vanilla", "gated"] | None = option(
        None,
        "block: form of that bias. silu, tanh = one layer over hidden state and embedding, linear "
        "= the embedding alone, vanilla = a row for each token, gated = vanilla times a gate. "
        "Only linear and vanilla can be exported. null = silu, or as drafter.init",
    )
    convolution: bool = option(False, "block: two-tap convolutions, initialized to identity")
    confidence_head: bool = option(False, "block: predict acceptance (objective.terms.confidence)")
    train: Literal["all", "confidence_head"] = option("all", "block: weights to train")
    mask_token_id: int | None = option(None, "id of the mask token; null = an unused token", low=0)
    attention: Literal["prefix_causal", "full"] = option(
        "prefix_causal",
        "standalone: attention of the prefix: causal (cached) or full (as published)",
    )
    attention_backend: Literal["sdpa", "flash_attn"] = option(
        "sdpa", "ddit: flash_attn needs full attention, a GPU and half precision"
    )
    window: int = option(512, "full attention: context tokens before a block", low=1, high=2**24)
    hidden_size: int = option(256, "ddit: width", low=8, high=2**16)
    heads: int = option(4, "ddit: attention heads", low=1, high=2**16)
    cond_dim: int = option(128, "ddit: width of the time conditioning", low=1, high=2**16)
    dropout: float = option(0.0, "ddit: dropout while training", low=0, high=0.9)
    time_input: Literal["sigma", "zero"] = option(
        "sigma", "ddit: conditioned on the noise (SEDD) or on zero (MDLM)"
    )
    schedule: Literal["loglinear", "geometric"] = option("loglinear", "noise schedule")
    prediction: Literal["log_score", "logits"] = option(
        "log_score", "standalone: the network's output: SEDD's log-score or MDLM's logits"
    )
    share_embedding: bool = option(True, "masked_lm: the target's embedding and head; else copies")
    lora_rank: int = option(0, "masked_lm: rank of updates; 0 = train all", low=0, high=2**16)
    lora_targets: list[str] = option(["q_proj", "k_proj", "v_proj", "o_proj"], "layers to update")

    @property
    def standalone(self) -> bool:
        """Whether it reads tokens alone."""
        return self.kind in ("ddit", "masked_lm")

    def validate(self) -> None:
        has_init = self.init is not None
        for name in ("confidence_head", "convolution", "markov", "block_layout"):
            value = getattr(self, name)
            given = f"drafter.{name}={str(value).lower()}"
            is_default = value is None or value is False
            require(self.kind == "block" or is_default, f"{given} needs drafter.kind=block")
        markov = f"drafter.markov={self.markov} needs drafter.markov_rank above 0"
        require(self.markov is None or self.markov_rank > 0, markov)
        require(
            self.train == "all" or (self.confidence_head and has_init),
            "drafter.train=confidence_head needs drafter.confidence_head=true and drafter.init, a "
            "trained drafter: all else is frozen",
        )
        lora = "drafter.lora_rank needs drafter.kind=masked_lm"
        require(self.lora_rank == 0 or self.kind == "masked_lm", lora)
        has_full = self.kind == "ddit" and self.attention == "full"
        flash = "drafter.attention_backend=flash_attn needs drafter.kind=ddit with "
        require(self.attention_backend == "sdpa" or has_full, f"{flash}drafter.attention=full")
        if self.target_layers is not None:
            is_shared = self.kind == "block" and self.context == "shared_kv"
            require(
                self.target_layers and (not is_shared or len(self.target_layers) == self.layers),
                f"drafter.target_layers={self.target_layers} must name at least one layer; for "
                f"shared_kv drafter.layers={self.layers} layers",
            )


@dataclass
class ObjectiveConfig(Section):
    """The loss."""

    terms: dict[str, float] = option(
        {"forward_kl": 1.0}, f"loss name: weight; names: {', '.join(LOSS_NAMES)}", above=0
    )
    weighting: Literal["d_pace", "exponential", "normalised", "uniform"] = option(
        "d_pace", "weights of the K positions; normalised = exponential, over their sum"
    )
    decay: float = option(4.0, "decay of the exponential weights, in positions", above=0)
    temperature: float = option(1.0, "temperature of p in the divergences", above=0)
    prefix_decay: float = option(
        0.0, "block: beta; the first j tokens are shown with probability ~ beta^j", low=0, high=1
    )
    chunk_rows: int = option(2048, "rows of logits computed at a time", low=1)
    diffusion: Literal["score_entropy", "masked_nll"] = option(
        "score_entropy", "standalone: SEDD's denoising score entropy, or MDLM's bound"
    )
    distillation: float = option(1.0, "stage=calibrate: λ, the weight of objective.terms", low=0)
    distillation_warmup: int = option(0, "steps over which λ rises from 0", low=0)
    times: Literal["low_discrepancy", "count"] = option(
        "low_discrepancy", "standalone: sampling of diffusion times; count = by number of masks"
    )
    annealing: int = option(
        0, "standalone, without drafter.init: steps until noisy tokens attend to the right", low=0
    )

    def validate(self) -> None:
        require(self.terms, f"objective.terms must name at least one loss{nearest('', LOSS_NAMES)}")
        for name in self.terms:
            near = nearest(name, LOSS_NAMES)
            require(name in LOSS_NAMES, f"objective.terms.{name}: unknown loss{near}")
