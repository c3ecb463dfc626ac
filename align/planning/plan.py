"""The plan of a recipe: sizes, memory, disk, time and expected τ, and what does not fit, with the key to change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from align.config.recipe import Recipe
from align.planning import memory
from align.planning.drafter_sizes import DrafterSizes, plan_drafter_sizes
from align.planning.hardware import Hardware
from align.planning.memory import KEPT, STEP, DiskSpace, NumberSizes, StageMemory
from align.planning.pilot import StageSeconds
from align.planning.target_sizes import TargetSizes, read_target_sizes
from align.planning.tau import ExpectedTau, predict_tau
from align.planning.text import FILL, TextSize, read_text_size
from align.target.dtypes import has_fast_bf16

GIB = 2**30


@dataclass
class TrainingPlan:
    """Everything known about a run before it starts. seconds: None if no pilot ran. misfits: what does not fit."""

    recipe: Recipe
    hardware: Hardware
    target: TargetSizes
    drafter: DrafterSizes
    text: TextSize
    stages: list[StageMemory]
    disk: DiskSpace
    tau: dict[str, ExpectedTau]
    seconds: StageSeconds | None = None
    misfits: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_seen(self) -> float:
        """Text tokens that training reads, all epochs counted."""
        trainer = self.recipe.trainer
        return trainer.max_steps * trainer.batch_size * self.recipe.data.length * FILL

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for --json."""
        return {
            "recipe": self.recipe.name,
            "target": {**vars(self.target), "layers": self.target.num_layers},
            "drafter": vars(self.drafter),
            "hardware": vars(self.hardware),
            "text": {**vars(self.text), "total_tokens": self.text.total},
            "memory_bytes": {stage.stage: stage.bytes for stage in self.stages},
            "memory_parts": {stage.stage: stage.parts for stage in self.stages},
            "disk_bytes": {**vars(self.disk), "total": self.disk.bytes},
            "seconds": None if self.seconds is None else vars(self.seconds),
            "tokens_seen": self.tokens_seen,
            **{f"tau_{how}": vars(tau) for how, tau in self.tau.items()},
            "misfits": self.misfits,
            "notes": self.notes,
        }


def make_plan(recipe: Recipe, hardware: Hardware, text: TextSize | None = None) -> TrainingPlan:
    """The plan without its time.

    Raises:
        UserError: a target whose config is unavailable, or options that do not fit it.
    """
    options = recipe.target
    target = read_target_sizes(options.name, options.revision, options.trust_remote_code)
    drafter = plan_drafter_sizes(recipe, target)
    text = text or read_text_size(recipe)
    sizes = find_number_sizes(recipe, hardware)
    stages = [memory.plan_writing(recipe, target, sizes)]
    if recipe.trainer.features_gb:
        stages.append(memory.plan_features(recipe, target, drafter, sizes))
    stages.append(memory.plan_training(recipe, target, drafter, text, sizes))
    disk = memory.plan_disk(recipe, target, drafter, text)
    plan = TrainingPlan(recipe, hardware, target, drafter, text, stages, disk, {})
    for how in ("greedy", "sampling"):
        tau = predict_tau(drafter.kind, plan.tokens_seen, drafter.drafted, how, target.spec)
        if tau is not None:
            plan.tau[how] = tau
    plan.misfits = list_misfits(plan, sizes)
    if hardware.gpu and recipe.processes < hardware.count:
        plan.notes.append(
            f"the recipe trains on {recipe.processes} of {hardware.count} devices (launch.devices={hardware.count} takes all)"
        )
    return plan


def find_number_sizes(recipe: Recipe, hardware: Hardware) -> NumberSizes:
    dtype = recipe.target.dtype
    if dtype == "auto":
        fast = hardware.gpu or has_fast_bf16(torch.device("cpu"))
        dtype = (
            "bfloat16" if fast and (hardware.gpu or not recipe.target.name.startswith("debug")) else "float32"
        )
    target = 4 if dtype == "float32" else 2
    drafter = {"auto": target, "fp32": 4, "bf16": 2}[recipe.trainer.precision]
    # on a CPU a bf16 layer keeps a packed copy of its weights
    return NumberSizes(target, target if hardware.gpu else 4, drafter, hardware.gpu)


def list_misfits(plan: TrainingPlan, sizes: NumberSizes) -> list[str]:
    """A line for each thing that does not fit, with the key to change."""
    found, data, hardware = [], plan.recipe.data, plan.hardware
    for stage in plan.stages:
        # processes share a CPU's memory
        processes = plan.recipe.launch.devices if stage.stage == "training" and not hardware.gpu else 1
        if hardware.memory and stage.bytes * processes > hardware.memory:
            times = f" × {processes} processes" if processes > 1 else ""
            largest = f"{stage.largest} ({stage.parts[stage.largest] / GIB:.1f} GiB)"
            found.append(
                f"{stage.stage} takes {stage.bytes / GIB:.1f} GiB{times}, a device has {hardware.memory / GIB:.1f}; "
                f"most of it is {largest}: {_suggest(plan.recipe, stage, sizes)}"
            )
    limit = data.prompt_limit + data.max_answer_tokens
    if limit > plan.target.context_limit:
        found.append(
            f"data.max_prompt_tokens + data.max_answer_tokens = {limit} tokens exceed the target's context of "
            f"{plan.target.context_limit}: lower data.max_answer_tokens"
        )
    return found


def _suggest(recipe: Recipe, stage: StageMemory, sizes: NumberSizes) -> str:
    """What to change so that the largest part of a stage shrinks."""
    data, trainer = recipe.data, recipe.trainer
    more, part = "with several launch.devices", stage.largest
    if part == "target" and sizes.target == 4:
        return "target.dtype=bfloat16"
    if part == "target" and stage.stage == "training":
        return f"target.parallel=fsdp {more}"
    if part in ("cache (data.batch_size)", "logits"):
        return f"data.batch_size={max(1, data.batch_size // 2)}"
    if part == STEP and trainer.batch_size // (trainer.accumulate * recipe.processes) > 1:
        return f"trainer.accumulate={2 * trainer.accumulate}"
    if part == STEP:
        return f"trainer.anchors={max(1, trainer.anchors // 2)} or data.length={max(8, data.length // 2)}"
    if part == KEPT:
        return "a lower trainer.keep_features_gb, or trainer.features_gb (disk)"
    if part == "drafter":
        return f"launch.strategy=deepspeed_3 {more}, or fewer drafter.layers"
    if part in ("optimizer", "gradients", "a checkpoint"):
        return f"launch.strategy=deepspeed_2 {more}, or drafter.lora_rank"
    return "a device with more memory"
