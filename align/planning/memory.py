"""Bytes that writing, features and training take on one device, and on disk. Peaks, by parts that are named.

Checked against real runs. A process of torch takes memory before there is a model; on a CPU that is
measured here, on a GPU it is a context of `GPU_CONTEXT`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from align.config.recipe import Recipe
from align.planning.drafter import DrafterSize
from align.planning.skeleton import Skeleton
from align.planning.text import TextSize

MIB = 2**20
GPU_CONTEXT = 600 * MIB
"""Of CUDA and its libraries, before there is a model."""
IMPORTS = {"writing": 345 * MIB, "training": 390 * MIB}
"""Of a process on a CPU that has imported what it needs."""
LOADED = 45 * MIB
"""What loading any model adds, weights and tokenizer aside: transformers' modules."""
TOKENIZER = 750
"""Bytes a token of the vocabulary."""
HEAP = 1.2
"""Small blocks that are freed stay with the process: its memory over what is in use."""
KEPT = 0.5
"""Of a step's layers, what stays with the process while a standalone drafter is validated or saved."""
BIG = 32 * MIB
"""Larger blocks go back to the system when they are freed."""


@dataclass
class Need:
    """A stage's peak on one device: `parts` in bytes by what they are for."""

    stage: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class Types:
    """Bytes of a number: what the target computes with (`target`), its weights as they lie in memory (`weights`: on a CPU a bf16 layer
    keeps a packed copy beside them), the drafter's products (`products`)."""

    target: int
    weights: int
    products: int
    gpu: bool


def _process(stage: str, target: Skeleton, types: Types) -> float:
    """Before the weights."""
    if types.gpu:
        return GPU_CONTEXT
    return IMPORTS[stage] + LOADED + TOKENIZER * target.vocab_size


def writing(recipe: Recipe, target: Skeleton, types: Types) -> Need:
    """`align.synthesize`: weights, the cache of a batch, its logits."""
    d = recipe.data
    capacity = min(target.context_limit, d.prompt_limit + d.max_answer_tokens + 40)  # a template's tokens
    return Need(
        "writing",
        {
            "process": _process("writing", target, types),
            "target": target.parameters * types.weights,
            "cache (data.batch_size)": d.batch_size * capacity * target.kept * types.target,
            "logits": 3 * d.batch_size * target.vocab_size * 4,
        },
    )


def _row_forward(target: Skeleton, length: int, shared: bool, types: Types) -> float:
    """The target over a row: its layers' widest tensors, and all their keys and values where some are shared."""
    layer = length * (4 * target.hidden_size + 3 * target.inner_size) * types.target
    mask = length * length
    return layer + mask + (length * target.kept * types.target if shared else 0)


def features(recipe: Recipe, target: Skeleton, drafter: DrafterSize, types: Types) -> Need:
    """`align.features`: weights, a row, the head over parts of it, and the shard that waits to be written."""
    length = recipe.data.length
    shared = drafter.kind == "block" and recipe.drafter.context == "shared_kv"
    return Need(
        "features",
        {
            "process": _process("training", target, types),
            "target": target.parameters * types.weights,
            "a row": _row_forward(target, length, shared, types) + 2 * 256 * target.vocab_size * 4,
            "a shard": 2 * 64 * MIB,
        },
    )


def feature_bytes(recipe: Recipe, target: Skeleton, drafter: DrafterSize) -> int:
    """Bytes of a token's stored outputs: hidden state and what the drafter is shown of it, log-sum-exp, argmax and log p of the next
    token; with `trainer.features_top_k` ids and log p of so many tokens, and the hidden state where the drafter reads it."""
    number, top = 4 if recipe.trainer.features_dtype == "fp32" else 2, recipe.trainer.features_top_k
    read = recipe.drafter.kind == "block" and recipe.drafter.context == "shared_kv"
    hidden = target.hidden_size if read or not top else 0
    return (hidden + drafter.context) * number + 16 + min(top, target.vocab_size) * (4 + number)


def training(recipe: Recipe, target: Skeleton, drafter: DrafterSize, text: TextSize, types: Types) -> Need:
    """`align.train`: weights of both, gradients, AdamW's averages, what a step keeps for its backward pass, and the checkpoint that is
    put together in memory."""
    t, stage = recipe.trainer, _sharded(recipe)
    need = Need("training", {"process": _process("training", target, types)})
    parts = recipe.processes if recipe.target.parallel in ("fsdp", "tp") else 1
    # embedding, head and last norm stay whole; of FSDP2 one layer and the next one are. Given up, the layers leave a device out
    inside = sum(target.layers)
    kept = 0 if recipe.target.parallel == "absent" and types.gpu else inside / parts
    together = 2 * max(target.layers) if recipe.target.parallel == "fsdp" else 0
    need.parts["target"] = (target.parameters - inside + kept + together) * types.weights
    need.parts["drafter"] = 4 * drafter.parameters / stage["weights"]
    if drafter.vocabulary < target.vocab_size:
        need.parts["drafter"] += drafter.vocabulary * target.hidden_size * types.target
    need.parts["gradients"] = 4 * drafter.trained / stage["gradients"]
    if recipe.processes > 1 and recipe.launch.strategy in ("auto", "ddp"):
        need.parts["gradients"] *= 2  # the buckets that are summed
    need.parts["optimizer"] = 8 * drafter.trained / stage["optimizer"]
    if t.ema:
        # of ZeRO-3 they are whole in every process
        parts = stage["weights"] if recipe.launch.strategy == "fsdp" else 1
        need.parts["averaged weights"] = 4 * drafter.parameters / parts
    saving = 0 if types.gpu else 12 * drafter.trained / stage["optimizer"]
    body, head, validated = activations(recipe, target, drafter, text, types)
    key = "a step (trainer.batch_size)"
    if drafter.kind in (
        "block",
        "autoregressive",
    ):  # its blocks are small: they stay while a checkpoint is made
        need.parts |= {key: body + head, "a checkpoint": saving}
    else:
        need.parts[key] = max(body + head, KEPT * body + max(validated, saving))
    if t.keep_features_gb:
        whole = text.rows(recipe.data.length) * recipe.data.length
        share = whole * feature_bytes(recipe, target, drafter) / recipe.processes
        seen = t.max_steps * t.batch_size / max(1, text.rows(recipe.data.length))
        need.parts["kept outputs (trainer.keep_features_gb)"] = min(
            t.keep_features_gb * 1e9, share * min(1.0, seen)
        )
    return need


def _sharded(recipe: Recipe) -> dict[str, int]:
    """Over how many processes weights, gradients and optimizer state are split (ZeRO, FSDP2)."""
    name, n = recipe.launch.strategy, recipe.processes
    zero = 3 if name == "fsdp" else int(name[-1]) if name.startswith("deepspeed") else 0
    return {
        "optimizer": n if zero >= 1 else 1,
        "gradients": n if zero >= 2 else 1,
        "weights": n if zero >= 3 else 1,
    }


def anchors_used(recipe: Recipe, text: TextSize) -> int:
    """Anchors of a row: as many as are asked for, or as the row has places of answers."""
    places = max(1, int(recipe.data.length * 0.93 * text.answers))
    most = recipe.trainer.anchors
    if recipe.trainer.anchors_per == "document":
        most *= max(1, round(recipe.data.length / max(1.0, text.tokens)))
    return min(most, places)


def activations(
    recipe: Recipe, target: Skeleton, drafter: DrafterSize, text: TextSize, types: Types
) -> tuple[float, float, float]:
    """What a step holds at its peak: layers and target, the head and its losses; and those of a validation."""
    rows = recipe.trainer.batch_size // (recipe.trainer.accumulate * recipe.processes)
    length, kind = recipe.data.length, recipe.drafter.kind
    shared = kind == "block" and recipe.drafter.context == "shared_kv"
    forward = HEAP * rows * _row_forward(target, length, shared, types)
    used = anchors_used(recipe, text)
    if kind == "block":
        head = _row_head(
            recipe, drafter, rows * used * drafter.drafted, rows * min(used + drafter.drafted, length), types
        )
        return forward + _block_body(drafter, rows * used, length, types), head, 0.0
    if kind == "autoregressive":
        places = rows * min(length, used + drafter.drafted)
        body = HEAP * rows * _sequence_body(drafter, length, types)
        return forward + body, _row_head(recipe, drafter, places, places, types), 0.0
    body = HEAP * rows * _standalone_body(recipe, drafter, used, types)
    return (forward + body, *_logit_head(recipe, drafter, rows, used, types))


def _layer(drafter: DrafterSize, tokens: int, types: Types) -> float:
    """What a layer keeps of its tokens for the backward pass: norms, queries, keys, output, and four widths of the feed-forward."""
    width, inner = drafter.hidden_size, drafter.inner_size
    return tokens * (4 * 6 * width + types.products * (4 * width + 4 * inner))


def _block_body(drafter: DrafterSize, blocks: int, length: int, types: Types) -> float:
    """The block drafter's layers over its blocks; their attention weights are kept (fp32), and two more of their size live while
    one layer runs."""
    tokens = blocks * drafter.rows
    pairs = tokens * drafter.num_heads * (length + drafter.rows)
    kept, living = (
        (4, 8) if types.products == 4 else (6, 10)
    )  # in 16 bits a copy is kept beside the fp32 weights
    attention = pairs * (drafter.count * kept + living) * (1 if 4 * pairs > BIG else HEAP)
    return HEAP * drafter.count * _layer(drafter, tokens, types) + attention + 4 * length * drafter.context


def _sequence_body(drafter: DrafterSize, tokens: int, types: Types) -> float:
    """Layers over a sequence, its attention without kept weights; the mask is one byte a pair, and four as it is added."""
    return drafter.count * _layer(drafter, tokens, types) + 5 * tokens * tokens


def _standalone_body(recipe: Recipe, drafter: DrafterSize, used: int, types: Types) -> float:
    """Clean tokens and noisy blocks in one sequence, or each block behind a window of its own."""
    length, block = recipe.data.length, drafter.drafted
    if recipe.stage == "pretrain":
        return _sequence_body(drafter, length, types)
    if recipe.drafter.attention == "full":
        return used * _sequence_body(drafter, min(recipe.drafter.window, length) + block, types)
    return _sequence_body(drafter, length + used * block, types)


def _row_head(recipe: Recipe, drafter: DrafterSize, count: int, places: int, types: Types) -> float:
    """`align.losses.divergences.row_statistics`: log q of rows and log p of places, kept where they are few, else of one chunk; six more
    of what is computed at a time."""
    chunk = recipe.objective.chunk_rows
    cpu = max(128, 4 * MIB // (4 * drafter.vocabulary))
    if types.target == 2 and not types.gpu:  # a CPU multiplies the head in fp32
        return 4 * drafter.vocabulary * drafter.hidden_size + _row_head(
            recipe, drafter, count, places, replace(types, target=4)
        )
    rows = count + places if count <= chunk else 0
    if not (rows or types.gpu):  # blocks of a few MB that are freed stay with the process
        rows = min(count + places, 2 * chunk)
    kept = rows * drafter.vocabulary * 4
    return kept + 6 * min(cpu, chunk, count) * drafter.vocabulary * 4


def _logit_head(
    recipe: Recipe, drafter: DrafterSize, rows: int, used: int, types: Types
) -> tuple[float, float]:
    """Tensors of logits: a step's masked rows (half of them; a quarter of whole rows), nine at a time where p is compared with, else
    five; `align.losses.divergences.logit_statistics` at a validation, a quarter of a chunk at a time, seven."""
    validated = min(used * drafter.drafted, max(1, recipe.objective.chunk_rows // 4))
    whole = recipe.stage == "pretrain"
    trained = rows * (recipe.data.length * 0.93 / 4 if whole else used * drafter.drafted / 2)
    distilled = recipe.stage == "calibrate" and recipe.objective.distillation > 0
    head = (
        4 * drafter.vocabulary * drafter.hidden_size if types.target == 2 and not types.gpu else 0
    )  # in fp32
    step = 4 * drafter.vocabulary * (9 if distilled else 5) * trained
    return step + head * distilled, 4 * drafter.vocabulary * 7 * validated + head


@dataclass(frozen=True)
class Disk:
    """Bytes on disk by what they are."""

    text: float
    features: float
    checkpoints: float
    drafter: float

    @property
    def bytes(self) -> float:
        return self.text + self.features + self.checkpoints + self.drafter


def disk(recipe: Recipe, target: Skeleton, drafter: DrafterSize, text: TextSize) -> Disk:
    """What the output folder takes at its fullest: one checkpoint more than are kept while it is saved."""
    t = recipe.trainer
    every = text.rows(recipe.data.length) * recipe.data.length * feature_bytes(recipe, target, drafter)
    saved = (
        12 * drafter.trained
        + 4 * (drafter.parameters - drafter.trained)
        + (4 * drafter.parameters if t.ema else 0)
    )
    return Disk(
        text=text.total * (2.2 if target.vocab_size <= 1 << 16 else 4.2),
        features=min(t.features_gb * 1e9, every),
        checkpoints=(min(t.keep_checkpoints, -(-t.max_steps // t.checkpoint_every)) + 1) * saved,
        drafter=4.0 * drafter.parameters * (1 + len(t.milestones)),
    )
