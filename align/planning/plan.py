"""The plan of a recipe: sizes, memory, time and expected τ, and what does not fit, with the key to
change."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from align.config.hardware import accelerator, check_devices, check_packages, gpu_count
from align.config.recipe import Recipe
from align.planning.drafter_sizes import DrafterSizes, plan_drafter_sizes
from align.planning.memory import (
    CACHE,
    FILL,
    KEPT,
    STEP,
    NumberSizes,
    StageMemory,
    TextSize,
    plan_training,
    plan_writing,
    read_text_size,
)
from align.planning.pilot import StageSeconds, run_pilot, scale_seconds
from align.planning.target_sizes import TargetSizes, read_target_sizes
from align.planning.tau import ExpectedTau, predict_tau
from specalign.common.errors import UserError, nearest
from specalign.common.provenance import machine, memory_bytes
from specalign.common.text import say
from specalign.lm.dtypes import has_fast_bf16

GIB = 2**30
GPUS = {
    "h100": ("NVIDIA H100 SXM", 80e9),
    "h200": ("NVIDIA H200 SXM", 141e9),
    "a100": ("NVIDIA A100 SXM 80 GB", 80e9),
    "a100-40": ("NVIDIA A100 SXM 40 GB", 40e9),
    "l40s": ("NVIDIA L40S", 48e9),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24e9),
}
"""Title and memory, from NVIDIA's data sheets."""
REMEDIES = {
    "target": "target.dtype=bfloat16, or target.parallel=fsdp with several launch.devices",
    CACHE: "lower data.batch_size",
    "logits": "lower data.batch_size",
    STEP: "raise trainer.accumulate, or lower trainer.anchors or data.length",
    KEPT: "lower trainer.keep_features_gb, or use trainer.features_gb (disk)",
}
"""What to change if this part of a stage's memory is the largest."""
SPLIT = "launch.strategy=deepspeed_3 with several launch.devices, or fewer drafter.layers"


@dataclass(frozen=True)
class Hardware:
    """memory: bytes of a device (0 = unknown); count: devices."""

    title: str
    memory: float
    count: int = 1
    gpu: bool = True


def find_hardware(name: str) -> Hardware:
    """`NAME` or `NAMExCOUNT`. Raises UserError for an unknown name."""
    found = re.fullmatch(r"(.+?)(?:x([1-9]\d{0,4}))?", name.lower())
    known = found[1] if found else name
    if known not in GPUS:
        near = nearest(known, GPUS)
        raise UserError(f"--hardware {name}: unknown{near}; NAMExCOUNT for several, or --memory-gb")
    title, memory = GPUS[known]
    return Hardware(title, memory, int(found[2]) if found and found[2] else 1)


def find_local_hardware(recipe: Recipe) -> Hardware:
    """What the recipe runs on here: the machine's GPUs or its processor."""
    check_packages(recipe)
    check_devices(recipe)
    if accelerator(recipe) == "cpu":
        title = f"this machine ({machine()['processor']})"
        return Hardware(title, float(memory_bytes() or 0), gpu=False)
    device = torch.cuda.get_device_properties(0)
    return Hardware(f"this machine's {device.name}", float(device.total_memory), gpu_count())


@dataclass
class TrainingPlan:
    """Everything known about a run before it starts. tokens_seen: text tokens that training reads,
    all epochs counted. seconds: None if no pilot ran. misfits: what does not fit."""

    recipe: Recipe
    hardware: Hardware
    target: TargetSizes
    drafter: DrafterSizes
    text: TextSize
    stages: list[StageMemory]
    tokens_seen: float
    tau: dict[str, ExpectedTau] = field(default_factory=dict)
    seconds: StageSeconds | None = None
    misfits: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
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
        }


def make_plan(recipe: Recipe, hardware: Hardware, text: TextSize | None = None) -> TrainingPlan:
    """The plan without its time. Raises UserError: a target whose config is unavailable, or options
    that do not fit it."""
    options, trainer = recipe.target, recipe.trainer
    target = read_target_sizes(options.name, options.revision, options.trust_remote_code)
    drafter = plan_drafter_sizes(recipe, target)
    text = text or read_text_size(recipe)
    is_half = options.dtype != "float32"
    if options.dtype == "auto" and not hardware.gpu:
        is_debug = options.name.startswith("debug")
        is_half = has_fast_bf16(torch.device("cpu")) and not is_debug
    number = 2 if is_half else 4
    # on a CPU a bf16 layer keeps a packed copy of its weights
    sizes = NumberSizes(
        target=number,
        weights=number if hardware.gpu else 4,
        drafter={"auto": number, "fp32": 4, "bf16": 2}[trainer.precision],
        gpu=hardware.gpu,
    )
    writing = plan_writing(recipe, target, sizes)
    training = plan_training(recipe, target, drafter, text, sizes)
    seen = trainer.max_steps * trainer.batch_size * recipe.data.length * FILL
    plan = TrainingPlan(recipe, hardware, target, drafter, text, [writing, training], seen)
    for how in ("greedy", "sampling"):
        tau = predict_tau(drafter.kind, seen, drafter.drafted, how, target.spec)
        if tau is not None:
            plan.tau[how] = tau
    plan.misfits = _list_misfits(plan)
    return plan


def measure_plan(plan: TrainingPlan, importing: float) -> TrainingPlan:
    """The plan with what a pilot on this machine finds. `importing`: see `scale_seconds`."""
    say("running a short pilot …", error=True)
    pilot = run_pilot(plan.recipe, plan.text)
    measured = make_plan(plan.recipe, plan.hardware, pilot.text)
    measured.seconds = scale_seconds(plan.recipe, measured.text, pilot, importing)
    return measured


def _list_misfits(plan: TrainingPlan) -> list[str]:
    """A line for each thing that does not fit, with the key to change."""
    found, data, hardware = [], plan.recipe.data, plan.hardware
    for stage in plan.stages:
        is_shared = stage.stage == "training" and not hardware.gpu  # processes share a CPU's memory
        needed = stage.bytes * (plan.recipe.launch.devices if is_shared else 1)
        if hardware.memory and needed > hardware.memory:
            largest = max(stage.parts, key=lambda name: stage.parts[name])
            found.append(
                f"{stage.stage} takes {needed / GIB:.1f} GiB, a device has "
                f"{hardware.memory / GIB:.1f}; most of it is {largest} "
                f"({stage.parts[largest] / GIB:.1f} GiB); {REMEDIES.get(largest, SPLIT)}"
            )
    limit = data.prompt_limit + data.max_answer_tokens
    if limit > plan.target.context_limit:
        found.append(
            f"data.max_prompt_tokens + data.max_answer_tokens = {limit} tokens exceed the target's "
            f"context of {plan.target.context_limit}: lower data.max_answer_tokens"
        )
    return found


def render_plan(plan: TrainingPlan) -> str:
    """The plan as text."""
    recipe, target, drafter, text = plan.recipe, plan.target, plan.drafter, plan.text
    seconds = plan.seconds
    missing = "" if target.has_weights else "; its weights are not here"
    lines = [
        f"{recipe.name}: {target.spec} ({target.architecture}) on {plan.hardware.count} × "
        f"{plan.hardware.title}",
        "",
        f"target     {format_count(target.parameters)} parameters, {target.num_layers} layers, "
        f"{target.vocab_size:,} tokens, context {target.context_limit:,}{missing}",
        f"drafter    {format_count(drafter.parameters)} parameters, "
        f"{format_count(drafter.trained)} of them trained ({drafter.kind}, drafts of "
        f"{drafter.drafted})",
        f"text       {text.samples:,} samples ({text.written:,} are there), "
        f"{format_count(text.total)} tokens, {text.rows(recipe.data.length):,} rows of "
        f"{recipe.data.length}",
        f"           {text.tokens:.0f} tokens per sample ({text.source}), {text.kept:.0%} of "
        "written samples are kept",
        f"training   {recipe.trainer.max_steps:,} steps of {recipe.trainer.batch_size} rows: "
        f"{format_count(plan.tokens_seen)} text tokens",
        "",
        f"{'':<11}{'memory per device':>18}{'time':>10}   most of the memory",
    ]
    for stage in plan.stages:
        clock = "?" if seconds is None else format_seconds(getattr(seconds, stage.stage))
        largest = sorted(stage.parts.items(), key=lambda pair: -pair[1])[:3]
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
        lines.append(f"{stage.stage:<11}{format_bytes(stage.bytes):>18}{clock:>10}   {parts}")
    lines += ["", *_render_tau(plan)]
    if seconds is None:
        lines.append("time       unknown: a pilot on the device itself measures it")
    else:
        total = format_seconds(seconds.writing + seconds.training)
        lines.append(f"time       {total} in all, measured here on a few samples and steps")
    misfits = [f"DOES NOT FIT: {line}" for line in plan.misfits]
    return "\n".join([*lines, "", *(misfits or ["everything fits in memory"])])


def _render_tau(plan: TrainingPlan) -> list[str]:
    if not plan.tau:
        return [f"expected τ unknown: no run of drafter.kind={plan.drafter.kind} was measured"]
    names = {"greedy": "greedy", "sampling": "temperature 1"}
    shown = "; ".join(
        f"{names[how]} {t.value:.2f} [{t.low:.2f}, {t.high:.2f}]" for how, t in plan.tau.items()
    )
    known = next(iter(plan.tau.values()))
    runs = f"{known.runs} runs of this kind of {known.of}"
    lines = [f"expected τ {shown} (95% band, from {runs})"]
    return lines + ([f"           a guess: {known.guess}"] if known.guess else [])


def format_count(number: float) -> str:
    """A number with k, M, G or T."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_bytes(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= 0.1 * GIB else f"{number / 2**20:.0f} MiB"
