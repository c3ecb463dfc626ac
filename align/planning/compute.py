"""Floating-point operations and hours, from sizes. A product of m numbers with a weight of n is 2·m·n operations; a backward pass is
two forward ones of what is trained, one of what is not."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from align.config.recipe import Recipe
from align.planning.drafter import DrafterSize
from align.planning.hardware import Hardware
from align.planning.memory import Types, anchors_used
from align.planning.skeleton import Skeleton
from align.planning.text import TextSize
from align.training.optimizer import orthogonal_flops


@dataclass(frozen=True)
class Work:
    """Operations. sample: the target writes one sample. row: it reads one packed row. step_row: the drafter learns from one row.
    step: Muon moves the drafter's matrices, in each process."""

    sample: float
    row: float
    step_row: float
    step: float = 0.0


def work(recipe: Recipe, target: Skeleton, drafter: DrafterSize, text: TextSize) -> Work:
    """Of a recipe, by sample and row."""
    length = recipe.data.length
    used = anchors_used(recipe, text)
    places = min(length, used + drafter.drafted)
    whole = forward(target, length, min(length, text.tokens)) + 2 * target.head * places
    sample = forward(target, text.tokens, text.tokens / 2) + 2 * target.head * text.tokens
    muon = recipe.trainer.optimizer == "muon"
    step = sum(map(orthogonal_flops, drafter.matrices)) if muon else 0
    return Work(sample, whole, _learning(recipe, drafter, used), step)


def forward(target: Skeleton, tokens: float, seen: float) -> float:
    """The target's layers over `tokens` that see `seen` others in the mean."""
    attention = 4 * tokens * seen * target.num_heads * target.head_dim * target.num_layers
    return 2 * sum(target.active) * tokens + attention


def _learning(recipe: Recipe, drafter: DrafterSize, used: int) -> float:
    """The drafter's forward and backward pass over one row, its head and losses."""
    length, kind = recipe.data.length, recipe.drafter.kind
    whole = 3 if drafter.trained == drafter.parameters else 2
    places = min(length, used + drafter.drafted)
    tokens: float
    if kind == "block":
        tokens, seen = used * drafter.rows, float(length)
        shown = (
            2 * length * drafter.context * drafter.hidden_size if recipe.drafter.context == "taps" else 0.0
        )
        rows, p = used * drafter.drafted, places
    elif kind == "autoregressive":
        tokens, seen, shown, rows, p = length, length / 2, 0.0, places, places
    else:
        windows = recipe.drafter.attention == "full" and recipe.stage != "pretrain"
        blocks = used * drafter.drafted
        tokens = used * (min(recipe.drafter.window, length) + drafter.drafted) if windows else length + blocks
        tokens = length if recipe.stage == "pretrain" else tokens
        seen, shown = float(min(length, recipe.drafter.window) if windows else length), 0.0
        rows = length // 4 if recipe.stage == "pretrain" else blocks // 2
        p = places if recipe.stage == "calibrate" else 0
    attention = 4 * tokens * seen * drafter.num_heads * drafter.head_dim * drafter.count
    body = whole * drafter.passes * (2 * drafter.layers * tokens + attention) + whole * shown
    own = 2 * drafter.vocabulary * drafter.hidden_size
    heads = own * (rows * (3 if drafter.own_head else 2) + p)
    bias = 6 * drafter.vocabulary * drafter.markov_rank * rows
    return body + heads + bias


@dataclass(frozen=True)
class Seconds:
    """By stage, on all devices together; `feature`: of align.features alone."""

    writing: float
    training: float
    features: float
    how: str


def rows_trained(recipe: Recipe, text: TextSize) -> tuple[float, float]:
    """Rows that are trained on in all, and of them those that the target has to read: others are kept from an epoch before."""
    t = recipe.trainer
    every = float(t.max_steps * t.batch_size)
    keeps = t.keep_features_gb or t.features_gb
    return every, min(every, float(text.rows(recipe.data.length))) if keeps else every


def stated_seconds(
    recipe: Recipe,
    target: Skeleton,
    text: TextSize,
    w: Work,
    types: Types,
    hardware: Hardware,
    utilisation: float,
) -> Seconds:
    """From peaks: `utilisation` of the products', and as much of the bandwidth that is read at every step of writing; whichever takes
    longer. One device writes; those of `launch.devices` train, and share the work without loss."""
    d, t = recipe.data, recipe.trainer
    flops, bandwidth = hardware.flops * utilisation, hardware.bandwidth * utilisation
    training_flops = flops * min(hardware.count, recipe.processes)
    samples = (text.samples - text.there) / max(text.kept, 1e-9)
    batches = ceil(samples / d.batch_size)
    longest = d.prompt_limit + d.max_answer_tokens
    read = float(target.parameters * types.target * longest)
    read += d.batch_size * text.tokens * text.tokens / 2 * target.kept * types.target
    writing = max(samples * w.sample / flops, batches * read / bandwidth)
    every, fresh = rows_trained(recipe, text)
    validations = (t.max_steps // t.validate_every + 1) * t.validation_rows
    needs_target = not recipe.drafter.standalone or recipe.stage == "calibrate"
    target_rows = (fresh if needs_target else 0.0) + validations
    training = (target_rows * w.row + every * w.step_row + validations * w.step_row / 3) / training_flops
    training += t.max_steps * w.step / flops  # no process takes a part of it
    features = min(every, float(text.rows(d.length))) * w.row / flops
    how = (
        f"{utilisation:.0%} of the stated peak"
        if hardware.stated
        else f"{utilisation:.0%} of the speed of products measured here"
    )
    return Seconds(writing, training, features, how)
