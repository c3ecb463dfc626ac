"""Peak memory of a device in writing and training, by named parts.

Compared with real runs on a CPU and a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from align.config.recipe import Recipe
from align.planning.drafter_sizes import DrafterSizes
from align.planning.target_sizes import TargetSizes
from align.planning.text import FILL, TextSize

MIB = 2**20
GPU_PROCESS = 600 * MIB
"""CUDA and its libraries, before there is a model."""
CPU_PROCESS = {"writing": 390 * MIB, "training": 435 * MIB}
"""A process on a CPU after its imports."""
TOKENIZER = 750
"""Bytes per token of the vocabulary."""
HEAP = 1.2
"""Memory of the process over what is in use: small blocks that are freed stay with it."""
CACHE = "cache (data.batch_size)"
STEP = "a step (trainer.batch_size)"
KEPT = "kept outputs (trainer.keep_features_gb)"


@dataclass
class StageMemory:
    """The peak of a stage on one device: bytes by what they are for."""

    stage: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class NumberSizes:
    """Bytes of a number: of the target's products, of its weights in memory, and of the drafter's
    products."""

    target: int
    weights: int
    drafter: int
    gpu: bool

    @property
    def head_copy(self) -> int:
        """Bytes of a head's number in the copy that a CPU multiplies in fp32."""
        return 4 if self.target == 2 and not self.gpu else 0


def plan_writing(recipe: Recipe, target: TargetSizes, sizes: NumberSizes) -> StageMemory:
    """`align.synthesize`: weights, the cache of a batch, its logits."""
    data = recipe.data
    length = min(
        target.context_limit, data.prompt_limit + data.max_answer_tokens + 40
    )  # a template's tokens
    parts = {
        "process": _process("writing", target, sizes),
        "target": float(target.parameters * sizes.weights),
        CACHE: float(data.batch_size * length * target.cached * sizes.target),
        "logits": 3.0 * data.batch_size * target.vocab_size * 4,
    }
    return StageMemory("writing", parts)


def plan_training(
    recipe: Recipe, target: TargetSizes, drafter: DrafterSizes, text: TextSize, sizes: NumberSizes
) -> StageMemory:
    """`align.train`: weights of both, gradients, AdamW's averages, activations, and the checkpoint
    assembled in memory."""
    launch, processes = recipe.launch, recipe.processes
    # of ZeRO: stage 1 splits the optimizer's state, 2 gradients too, 3 weights too, as FSDP does
    split = (
        3
        if launch.strategy == "fsdp"
        else int(launch.strategy[-1])
        if "deepspeed" in launch.strategy
        else 0
    )
    weights, gradients, optimizer = (processes if split >= stage else 1 for stage in (3, 2, 1))
    buckets = 2 if processes > 1 and launch.strategy in ("auto", "ddp") else 1
    draft_head = (
        drafter.vocabulary * target.hidden_size if drafter.vocabulary < target.vocab_size else 0
    )
    parts = {
        "process": _process("training", target, sizes),
        "target": _target_weights(recipe, target, sizes),
        "drafter": 4 * drafter.parameters / weights + draft_head * sizes.target,
        "gradients": 4 * drafter.trained * buckets / gradients,
        "optimizer": 8 * drafter.trained / optimizer,
        STEP: _step(recipe, target, drafter, text, sizes),
    }
    if recipe.trainer.ema:
        parts["averaged weights"] = (
            4 * drafter.parameters / (weights if launch.strategy == "fsdp" else 1)
        )
    if not sizes.gpu:
        parts["a checkpoint"] = 12 * drafter.trained / optimizer
    if recipe.trainer.keep_features_gb:
        rows = min(
            text.rows(recipe.data.length), recipe.trainer.max_steps * recipe.trainer.batch_size
        )
        stored = rows * recipe.data.length * feature_bytes(recipe, target, drafter)
        parts[KEPT] = min(recipe.trainer.keep_features_gb * 1e9, stored / processes)
    return StageMemory("training", parts)


def _process(stage: str, target: TargetSizes, sizes: NumberSizes) -> float:
    return GPU_PROCESS if sizes.gpu else CPU_PROCESS[stage] + TOKENIZER * target.vocab_size


def _target_weights(recipe: Recipe, target: TargetSizes, sizes: NumberSizes) -> float:
    """The target's weights on a device; embedding, head and last norm are never split."""
    layers, parallel = sum(target.layers), recipe.target.parallel
    held = float(layers)
    if parallel == "absent" and sizes.gpu:
        held = 0.0
    elif parallel in ("fsdp", "tp"):
        held = layers / recipe.processes
    if parallel == "fsdp":
        held += 2 * max(target.layers)  # the layer that runs and the next one are whole
    return (target.parameters - layers + held) * sizes.weights


def _reads_shared_keys(recipe: Recipe) -> bool:
    return recipe.drafter.kind == "block" and recipe.drafter.context == "shared_kv"


def _target_forward(
    recipe: Recipe, target: TargetSizes, drafter: DrafterSizes, sizes: NumberSizes
) -> float:
    """The target over a row: a layer's widest tensors, the mask, and what the drafter reads."""
    length = recipe.data.length
    layer = length * (4 * target.hidden_size + 3 * target.inner_size) * sizes.target
    keys = length * target.cached * sizes.target if _reads_shared_keys(recipe) else 0
    return float(layer + length**2 + keys)


def feature_bytes(recipe: Recipe, target: TargetSizes, drafter: DrafterSizes) -> int:
    """Bytes of a token's stored outputs: hidden state, what the drafter reads, log-sum-exp, argmax
    and log p of the next token; with `trainer.features_top_k` the ids and log p of that many
    tokens, and the hidden state only if the drafter reads it."""
    number, top = 4 if recipe.trainer.features_dtype == "fp32" else 2, recipe.trainer.features_top_k
    hidden = target.hidden_size if _reads_shared_keys(recipe) or not top else 0
    return (hidden + drafter.context) * number + 16 + min(top, target.vocab_size) * (4 + number)


def count_anchors(recipe: Recipe, text: TextSize) -> int:
    """Anchors of a row: those asked for, at most its answer positions."""
    length, most = recipe.data.length, recipe.trainer.anchors
    if recipe.trainer.anchors_per == "document":
        most *= max(1, round(length / max(1.0, text.tokens)))
    return min(most, max(1, int(length * FILL * text.answers)))


def _step(
    recipe: Recipe, target: TargetSizes, drafter: DrafterSizes, text: TextSize, sizes: NumberSizes
) -> float:
    """What a step holds at its peak: the target's forward pass, the drafter's layers for the
    backward pass, logits."""
    rows = recipe.trainer.batch_size // (recipe.trainer.accumulate * recipe.processes)
    anchors, length = count_anchors(recipe, text), recipe.data.length
    if drafter.kind == "block":
        tokens = anchors * drafter.rows
        # attention weights are kept in fp32, in 16 bits a copy too, and two more are alive while a
        # layer runs
        per_pair = 4 * drafter.layers + 8 if sizes.drafter == 4 else 6 * drafter.layers + 10
        attention = tokens * drafter.num_heads * (length + drafter.rows) * per_pair
        attention += 4 * length * drafter.context
    else:
        sequences, each = _sequences(recipe, drafter, anchors)
        tokens = sequences * each
        attention = 5 * sequences * each**2  # the mask: a byte per pair, four while it is added
    width, inner = drafter.hidden_size, drafter.inner_size
    # norms, queries, keys and outputs, and four tensors of the feed-forward part
    layers = drafter.layers * tokens * (24 * width + sizes.drafter * (4 * width + 4 * inner))
    body = HEAP * (_target_forward(recipe, target, drafter, sizes) + layers) + attention
    head = sizes.head_copy * drafter.vocabulary * drafter.hidden_size
    logits = 4 * drafter.vocabulary * _logit_rows(recipe, drafter, rows, anchors, sizes.gpu)
    return rows * body + head + logits


def _sequences(recipe: Recipe, drafter: DrafterSizes, anchors: int) -> tuple[int, int]:
    """How many sequences the drafter reads per row, and their length."""
    length = recipe.data.length
    if recipe.stage == "pretrain" or drafter.kind == "autoregressive":
        return 1, length
    if recipe.drafter.attention == "full":
        return anchors, min(recipe.drafter.window, length) + drafter.drafted
    return 1, length + anchors * drafter.drafted


def _logit_rows(recipe: Recipe, drafter: DrafterSizes, rows: int, anchors: int, gpu: bool) -> float:
    """Rows of logits that are alive at the peak of a step."""
    length, chunk = recipe.data.length, recipe.objective.chunk_rows
    places = rows * min(length, anchors + drafter.drafted)
    if drafter.kind == "block" or drafter.kind == "autoregressive":
        count = rows * anchors * drafter.drafted if drafter.kind == "block" else places
        kept = 0 if gpu and count > chunk else min(count + places, 2 * chunk)
        return kept + 6 * min(128, count)
    # half of a block is masked, a quarter of a whole row; next to p there are nine tensors, else
    # five
    masked = length * FILL / 4 if recipe.stage == "pretrain" else anchors * drafter.drafted / 2
    distilled = recipe.stage == "calibrate" and recipe.objective.distillation > 0
    validated = 7 * min(anchors * drafter.drafted, max(1, chunk // 4))
    return max(validated, rows * masked * (9 if distilled else 5))
