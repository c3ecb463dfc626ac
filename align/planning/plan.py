"""The plan of a recipe: sizes, memory, time and expected τ, and what does not fit, with the key to
change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from align.config.recipe import Recipe
from align.planning import memory
from align.planning.drafter_sizes import DrafterSizes, plan_drafter_sizes
from align.planning.hardware import Hardware
from align.planning.memory import CACHE, KEPT, STEP, NumberSizes, StageMemory
from align.planning.pilot import StageSeconds
from align.planning.target_sizes import TargetSizes, read_target_sizes
from align.planning.tau import ExpectedTau, predict_tau
from align.planning.text import FILL, TextSize, read_text_size
from specalign.lm.dtypes import has_fast_bf16

GIB = 2**30
SPLIT = "with several launch.devices"
REMEDIES = {
    "target": f"set target.dtype=bfloat16, or target.parallel=fsdp {SPLIT}",
    CACHE: "lower data.batch_size",
    "logits": "lower data.batch_size",
    STEP: "raise trainer.accumulate, or lower trainer.anchors or data.length",
    KEPT: "lower trainer.keep_features_gb, or use trainer.features_gb (disk)",
    "drafter": f"set launch.strategy=deepspeed_3 {SPLIT}, or lower drafter.layers",
    "optimizer": f"set launch.strategy=deepspeed_2 {SPLIT}, or drafter.lora_rank",
    "gradients": f"set launch.strategy=deepspeed_2 {SPLIT}, or drafter.lora_rank",
}
"""What to change if this part of a stage's memory is the largest."""


@dataclass
class TrainingPlan:
    """Everything known about a run before it starts. seconds: None if no pilot ran. misfits: what
    does not fit."""

    recipe: Recipe
    hardware: Hardware
    target: TargetSizes
    drafter: DrafterSizes
    text: TextSize
    stages: list[StageMemory]
    tau: dict[str, ExpectedTau] = field(default_factory=dict)
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
    stages.append(memory.plan_training(recipe, target, drafter, text, sizes))
    plan = TrainingPlan(recipe, hardware, target, drafter, text, stages)
    for how in ("greedy", "sampling"):
        tau = predict_tau(drafter.kind, plan.tokens_seen, drafter.drafted, how, target.spec)
        if tau is not None:
            plan.tau[how] = tau
    plan.misfits = list_misfits(plan)
    return plan


def find_number_sizes(recipe: Recipe, hardware: Hardware) -> NumberSizes:
    dtype = recipe.target.dtype
    if dtype == "auto":
        fast = hardware.gpu or has_fast_bf16(torch.device("cpu"))
        dtype = (
            "bfloat16"
            if fast and (hardware.gpu or not recipe.target.name.startswith("debug"))
            else "float32"
        )
    target = 4 if dtype == "float32" else 2
    drafter = {"auto": target, "fp32": 4, "bf16": 2}[recipe.trainer.precision]
    # on a CPU a bf16 layer keeps a packed copy of its weights
    return NumberSizes(target, target if hardware.gpu else 4, drafter, hardware.gpu)


def list_misfits(plan: TrainingPlan) -> list[str]:
    """A line for each thing that does not fit, with the key to change."""
    found, data, hardware = [], plan.recipe.data, plan.hardware
    for stage in plan.stages:
        # processes share a CPU's memory
        processes = (
            plan.recipe.launch.devices if stage.stage == "training" and not hardware.gpu else 1
        )
        if hardware.memory and stage.bytes * processes > hardware.memory:
            times = f" × {processes} processes" if processes > 1 else ""
            largest = f"{stage.largest} ({stage.parts[stage.largest] / GIB:.1f} GiB)"
            found.append(
                f"{stage.stage} takes {stage.bytes / GIB:.1f} GiB{times}, a device has "
                f"{hardware.memory / GIB:.1f}; "
                f"most of it is {largest}; "
                f"{REMEDIES.get(stage.largest, 'take a device with more memory')}"
            )
    limit = data.prompt_limit + data.max_answer_tokens
    if limit > plan.target.context_limit:
        found.append(
            f"data.max_prompt_tokens + data.max_answer_tokens = {limit} tokens exceed the target's "
            "context of "
            f"{plan.target.context_limit}: lower data.max_answer_tokens"
        )
    return found
