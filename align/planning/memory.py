"""Peak memory of a device while generating and training, by named parts."""

from dataclasses import dataclass

import torch

from align.config.data import TEMPLATE
from align.config.recipe import Recipe
from align.planning.drafter_sizes import DrafterSizes
from align.planning.target_sizes import TargetSizes
from specalign.lm.dtypes import has_fast_bf16
from specalign.lm.names import DEBUG

PROCESS_BYTES = 600 * 2**20  # a process after its imports, before there is a model
TOKENS_OF_LIMIT = 0.82
"""Assumed tokens of a sample as a share of its limits: 269k tokens in 1,363 samples of 80 + 160."""
ANSWER_SHARE = 0.7  # assumed share of a sample's tokens that are answer
FILL = 0.93  # share of a packed row that is text
Parts = dict[str, float]  # the peak of a stage on one device: bytes by what they are for


@dataclass(frozen=True)
class NumberSizes:
    """Bytes of a number: of the target's products, of its weights in memory, and of the drafter's
    products."""

    target: int
    weights: int
    drafter: int
    gpu: bool


def choose_number_sizes(recipe: Recipe, gpu: bool) -> NumberSizes:
    """For the dtypes of a recipe on a GPU or this machine's processor."""
    dtype = recipe.target.dtype
    is_half = dtype != "float32"
    if dtype == "auto" and not gpu:
        is_half = has_fast_bf16(torch.device("cpu")) and recipe.target.name not in DEBUG
    number = 2 if is_half else 4
    drafter = {"auto": number, "fp32": 4, "bf16": 2}[recipe.trainer.precision]
    # on a CPU a bf16 layer keeps a packed copy of its weights
    return NumberSizes(number, number if gpu else 4, drafter, gpu)


def plan_writing(recipe: Recipe, target: TargetSizes, sizes: NumberSizes) -> Parts:
    """`align.synthesize`: weights, the cache of a batch, its logits."""
    data = recipe.data
    length = min(target.context_limit, data.prompt_limit + data.max_answer_tokens + TEMPLATE)
    return {
        "process": float(PROCESS_BYTES),
        "target": float(target.parameters * sizes.weights),
        "cache": float(data.batch_size * length * target.cached * sizes.target),
        "logits": 3.0 * data.batch_size * target.vocab_size * 4,
    }


def plan_training(
    recipe: Recipe, target: TargetSizes, drafter: DrafterSizes, sizes: NumberSizes
) -> Parts:
    """`align.train`: weights of both, gradients, AdamW's averages, activations, and the checkpoint
    assembled in memory."""
    launch, trainer, processes = recipe.launch, recipe.trainer, recipe.processes
    # ZeRO-1 splits the optimizer's state, 2 gradients too, 3 weights too, as FSDP does
    split = {"fsdp": 3, "deepspeed_1": 1, "deepspeed_2": 2, "deepspeed_3": 3}
    sharded = split.get(launch.strategy, 0)
    weights, gradients, optimizer = (processes if sharded >= n else 1 for n in (3, 2, 1))
    buckets = 2 if processes > 1 and launch.strategy in ("auto", "ddp") else 1
    parts = {
        "process": float(PROCESS_BYTES),
        "target": _count_target(recipe, target) * sizes.weights,
        "drafter": 4 * drafter.parameters / weights,
        "gradients": 4 * drafter.trained * buckets / gradients,
        "optimizer": 8 * drafter.trained / optimizer,
        "a step": _plan_step(recipe, target, drafter, sizes),
    }
    if drafter.vocabulary < target.vocab_size:
        parts["drafter"] += drafter.vocabulary * target.hidden_size * sizes.target
    if trainer.ema:
        shards = processes if launch.strategy == "fsdp" else 1
        parts["averaged weights"] = 4 * drafter.parameters / shards
    if trainer.keep_features_gb:
        limit = recipe.data.prompt_limit + recipe.data.max_answer_tokens
        text = recipe.data.samples * TOKENS_OF_LIMIT * limit / FILL
        tokens = min(text, trainer.max_steps * trainer.batch_size * recipe.data.length)
        stored = tokens * feature_bytes(recipe, target, drafter) / processes
        parts["kept outputs"] = min(1e9 * trainer.keep_features_gb, stored)
    if not sizes.gpu:
        parts["checkpoint"] = 12 * drafter.trained / optimizer
    return parts


def _count_target(recipe: Recipe, target: TargetSizes) -> float:
    """Numbers of the target on a device; embedding, head and last norm are never split."""
    layers = sum(target.layers)
    rest = target.parameters - layers
    if recipe.target.parallel == "fsdp":  # the layer that runs and the next one are whole
        return rest + layers / recipe.processes + 2 * max(target.layers)
    return target.parameters


def feature_bytes(recipe: Recipe, target: TargetSizes, drafter: DrafterSizes) -> int:
    """Bytes of a token's stored outputs: hidden state, what the drafter reads, log-sum-exp, argmax
    and log p of the next token."""
    number = 4 if recipe.trainer.features_dtype == "fp32" else 2
    return (target.hidden_size + drafter.context) * number + 16


def _plan_step(
    recipe: Recipe, target: TargetSizes, drafter: DrafterSizes, sizes: NumberSizes
) -> float:
    """What a step holds at its peak: the target's forward pass, the drafter's layers for the
    backward pass, logits."""
    length, trainer, options = recipe.data.length, recipe.trainer, recipe.drafter
    rows = trainer.batch_size // (trainer.accumulate * recipe.processes)
    anchors = min(trainer.anchors, max(1, int(length * FILL * ANSWER_SHARE)))
    if drafter.kind == "block":
        tokens = anchors * drafter.rows
        # attention weights are kept in fp32, in 16 bits a copy too, and two more are alive while a
        # layer runs
        per_pair = 4 * drafter.layers + 8 if sizes.drafter == 4 else 6 * drafter.layers + 10
        attention = tokens * drafter.num_heads * (length + drafter.rows) * per_pair
        attention += 4 * length * drafter.context
    else:
        sequences, each = 1, length + anchors * drafter.drafted
        if recipe.stage == "pretrain" or drafter.kind == "autoregressive":
            each = length
        elif options.attention == "full":
            sequences, each = anchors, min(options.window, length) + drafter.drafted
        tokens = sequences * each
        attention = 5 * sequences * each**2  # the mask: a byte per pair, four while it is added
    # norms, queries, keys and outputs, and four tensors of the feed-forward part
    width, inner = drafter.hidden_size, drafter.inner_size
    layers = drafter.layers * tokens * (24 * width + sizes.drafter * (4 * width + 4 * inner))
    forward = length * (4 * target.hidden_size + 3 * target.inner_size) * sizes.target + length**2
    if drafter.kind == "block" and options.context == "shared_kv":
        forward += length * target.cached * sizes.target
    logits = 4 * drafter.vocabulary * _count_logit_rows(recipe, drafter, rows, anchors)
    return rows * (forward + layers + attention) + logits


def _count_logit_rows(recipe: Recipe, drafter: DrafterSizes, rows: int, anchors: int) -> float:
    """Rows of logits that are alive at the peak of a step."""
    length, chunk = recipe.data.length, recipe.objective.chunk_rows
    drafted = anchors * drafter.drafted
    if drafter.kind in ("block", "autoregressive"):
        places = rows * min(length, anchors + drafter.drafted)
        count = rows * drafted if drafter.kind == "block" else places
        return min(count + places, 2 * chunk) + 6 * min(128, count)
    # half of a block is masked, a quarter of a whole row; next to p there are nine tensors, else
    # five
    masked = length * FILL / 4 if recipe.stage == "pretrain" else drafted / 2
    is_distilled = recipe.stage == "calibrate" and recipe.objective.distillation > 0
    validated = 7 * min(drafted, max(1, chunk // 4))
    return max(validated, rows * masked * (9 if is_distilled else 5))
