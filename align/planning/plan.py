"""The plan of a recipe: sizes, bytes, operations, hours, expected τ and price, and what does not fit, with the key to change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from align.config.recipe import Recipe
from align.planning import memory
from align.planning.compute import Seconds, Work, stated_seconds, work
from align.planning.drafter import DrafterSize, drafter_size
from align.planning.hardware import Hardware
from align.planning.memory import Disk, Need, Types
from align.planning.skeleton import Skeleton, skeleton
from align.planning.tau import ExpectedTau, expected_tau
from align.planning.text import FILL, TextSize, text_size

SHORT_STEP = 0.05
"""Seconds of a training step below which a GPU waits for the host."""


@dataclass(frozen=True)
class Misfit:
    """What does not fit: said before it starts. `line` names the key to change."""

    line: str


@dataclass
class Plan:
    """All that is known of a run before it. seconds: on the hardware; None = neither tried nor asked for."""

    recipe: Recipe
    hardware: Hardware
    target: Skeleton
    drafter: DrafterSize
    text: TextSize
    types: Types
    work: Work
    needs: list[Need]
    disk: Disk
    seconds: Seconds | None = None
    greedy: ExpectedTau | None = None
    sampling: ExpectedTau | None = None
    misfits: list[Misfit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_seen(self) -> float:
        """Text tokens that training reads, all epochs counted."""
        t = self.recipe.trainer
        return t.max_steps * t.batch_size * self.recipe.data.length * FILL

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for --json."""
        s, parts = self.seconds, {need.stage: need.parts for need in self.needs}
        return {
            "recipe": self.recipe.name,
            "target": {
                **vars(self.target),
                "layers": len(self.target.layers),
                "active": sum(self.target.active),
            },
            "drafter": vars(self.drafter),
            "hardware": vars(self.hardware),
            "text": {**vars(self.text), "total_tokens": self.text.total},
            "memory_bytes": {need.stage: need.bytes for need in self.needs},
            "memory_parts": parts,
            "disk_bytes": {**vars(self.disk), "total": self.disk.bytes},
            "flops": {
                "sample": self.work.sample,
                "row_target": self.work.row,
                "row_drafter": self.work.step_row,
                "step_muon": self.work.step,
            },
            "seconds": None if s is None else vars(s),
            "tokens_seen": self.tokens_seen,
            "tau_greedy": None if self.greedy is None else vars(self.greedy),
            "tau_sampling": None if self.sampling is None else vars(self.sampling),
            "misfits": [m.line for m in self.misfits],
            "notes": self.notes,
        }


def make_plan(recipe: Recipe, hardware: Hardware, text: TextSize | None = None) -> Plan:
    """Everything but the hours.

    Raises:
        UserError: a target whose config can't be had, options that do not fit it.
    """
    t = recipe.target
    target = skeleton(t.name, t.revision, t.trust_remote_code)
    drafter = drafter_size(recipe, target)
    text, types = text or text_size(recipe), number_types(recipe, hardware)
    needs = [memory.writing(recipe, target, types), memory.training(recipe, target, drafter, text, types)]
    if recipe.trainer.features_gb:
        needs.insert(1, memory.features(recipe, target, drafter, types))
    plan = Plan(
        recipe, hardware, target, drafter, text, types, work(recipe, target, drafter, text), needs,
        memory.disk(recipe, target, drafter, text),
    )  # fmt: skip
    kind = recipe.drafter.kind
    plan.greedy = expected_tau(kind, plan.tokens_seen, drafter.drafted, "greedy", t.name)
    plan.sampling = expected_tau(kind, plan.tokens_seen, drafter.drafted, "sampling", t.name)
    plan.misfits = misfits(plan)
    return plan


def number_types(recipe: Recipe, hardware: Hardware) -> Types:
    """Bytes of a number of the target and of products there."""
    name = recipe.target.dtype
    if name == "auto":
        half = hardware.gpu or (not recipe.target.name.startswith("debug") and _cpu_takes_bf16())
        name = "bfloat16" if half else "float32"
    target = 4 if name == "float32" else 2
    precision = recipe.trainer.precision
    products = target if precision == "auto" else {"fp32": 4, "bf16": 2}[precision]
    return Types(target, target if hardware.gpu else 4, products, hardware.gpu)


def _cpu_takes_bf16() -> bool:
    import torch

    from align.target.dtypes import has_fast_bf16

    return has_fast_bf16(torch.device("cpu"))


def add_hours(plan: Plan, utilisation: float) -> None:
    """From stated or measured peaks."""
    plan.seconds = stated_seconds(
        plan.recipe, plan.target, plan.text, plan.work, plan.types, plan.hardware, utilisation
    )
    elsewhere = " (--hardware left out)" if plan.hardware.stated else ""
    plan.notes.append(
        f"hours are from operations and bytes alone: a trial on the device itself sees more{elsewhere}"
    )
    t = plan.recipe.trainer
    step = plan.seconds.training / t.max_steps
    if t.max_minutes is not None and plan.seconds.training > 60 * t.max_minutes:
        plan.seconds = replace(plan.seconds, training=60 * t.max_minutes)
        plan.notes.append(
            f"trainer.max_minutes={t.max_minutes:g} ends training before its {t.max_steps} steps: tokens and τ are those of all steps"
        )
    if plan.hardware.gpu and step < SHORT_STEP:
        plan.notes.append(
            f"a step is {1e3 * step:.1f} ms of operations: starting them takes longer than that, so expect more than is said here"
        )


def misfits(plan: Plan) -> list[Misfit]:
    """What will not run as it stands."""
    r, h, found = plan.recipe, plan.hardware, []
    for need in plan.needs:
        each = 1 if h.gpu else (r.launch.devices if need.stage == "training" else 1)
        if h.memory and need.bytes * each > h.memory:
            found.append(Misfit(_too_large(plan, need, each)))
    longest = r.data.prompt_limit + r.data.max_answer_tokens
    if longest > plan.target.context_limit:
        found.append(
            Misfit(
                f"data.max_prompt_tokens + data.max_answer_tokens = {longest} tokens are more than the target's context of "
                f"{plan.target.context_limit}: samples are cut there; lower data.max_answer_tokens"
            )
        )
    if h.gpu and r.processes < h.count:
        plan.notes.append(
            f"launch.devices={r.launch.devices} × launch.num_nodes={r.launch.num_nodes} train on {r.processes} of {h.count} devices; hours and "
            f"memory are planned for these (launch.devices={h.count} takes all)"
        )
    return found


def _too_large(plan: Plan, need: Need, each: int) -> str:
    r, h = plan.recipe, plan.hardware
    gib, part = 2**30, need.largest
    times = f" × {each} processes" if each > 1 else ""
    line = f"{need.stage} takes {need.bytes / gib:.1f} GiB{times}, a device has {h.memory / gib:.1f}; most of it is {part} ({need.parts[part] / gib:.1f} GiB): "
    key = {
        "target": "target.dtype=bfloat16"
        if plan.types.target == 4
        else "target.parallel=fsdp with several launch.devices"
        if need.stage == "training"
        else "a device with more memory, or a smaller target",
        "cache (data.batch_size)": f"data.batch_size={max(1, r.data.batch_size // 2)}",
        "logits": f"data.batch_size={max(1, r.data.batch_size // 2)}",
        "optimizer": "launch.strategy=deepspeed_2 with several launch.devices, or drafter.lora_rank for a masked language model",
        "gradients": "launch.strategy=deepspeed_2 with several launch.devices",
        "drafter": "launch.strategy=deepspeed_3 with several launch.devices, or fewer drafter.layers",
        "a step (trainer.batch_size)": _smaller_step(r),
        "kept outputs (trainer.keep_features_gb)": "a lower trainer.keep_features_gb, or trainer.features_gb (disk)",
        "a checkpoint": "launch.strategy=deepspeed_2 with several launch.devices",
    }.get(part, "a device with more memory")
    return line + key


def _smaller_step(recipe: Recipe) -> str:
    t = recipe.trainer
    if t.batch_size // (t.accumulate * recipe.processes) > 1:
        return f"trainer.accumulate={2 * t.accumulate}"
    return f"trainer.anchors={max(1, t.anchors // 2)} or data.length={max(8, recipe.data.length // 2)}"
