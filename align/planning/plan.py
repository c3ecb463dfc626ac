"""The plan of a recipe: sizes, memory, time and expected τ, and what does not fit, with the key to
change."""

from dataclasses import dataclass
from pathlib import Path

import torch

from align.config.hardware import accelerator, check_devices, check_packages
from align.config.recipe import Recipe
from align.planning.drafter_sizes import DrafterSizes, plan_drafter_sizes
from align.planning.memory import FILL, Parts, choose_number_sizes, plan_training, plan_writing
from align.planning.target_sizes import TargetSizes, read_target_sizes
from align.planning.tau import ExpectedTau, predict_tau
from specalign.common.errors import UserError, nearest
from specalign.common.pages import render_page
from specalign.common.provenance import machine, memory_bytes
from specalign.common.text import clock, plural
from specalign.rows.shards import read_manifest

GIB = 2**30
GPUS = {"h100": 80, "h200": 141, "a100": 80, "a100-40": 40, "l40s": 48, "rtx4090": 24}
"""Memory in GB, from NVIDIA's data sheets."""
REMEDIES = {
    "writing": "lower data.batch_size, or target.dtype=bfloat16",
    "training": "raise trainer.accumulate, lower trainer.anchors, data.length or "
    "trainer.keep_features_gb, or shard with target.parallel=fsdp and launch.strategy=deepspeed_3",
}
"""What to change if a stage does not fit."""


@dataclass(frozen=True)
class Hardware:
    """memory: bytes of a device; 0 = unknown."""

    title: str
    memory: float
    gpu: bool = True


def find_hardware(name: str) -> Hardware:
    """A listed GPU, or one with that many GB. Raises UserError for an unknown name."""
    known = {**GPUS, name: float(name)} if name.replace(".", "", 1).isdecimal() else GPUS
    if name not in known:
        raise UserError(f"--hardware {name}: unknown{nearest(name, GPUS)}; or its memory in GB")
    return Hardware(f"a GPU of {known[name]:g} GB", 1e9 * known[name])


def find_local_hardware(recipe: Recipe) -> Hardware:
    """What the recipe runs on here: the machine's GPUs or its processor."""
    check_packages(recipe)
    check_devices(recipe)
    if accelerator(recipe) == "cpu":
        title = f"this machine ({machine()['processor']})"
        return Hardware(title, float(memory_bytes() or 0), gpu=False)
    device = torch.cuda.get_device_properties(0)
    return Hardware(f"this machine's {device.name}", float(device.total_memory))


@dataclass(frozen=True)
class TrainingPlan:
    """Everything known about a run before it starts. written: samples that are there. stages: the
    memory of each. tokens_seen: text tokens that training reads, all epochs counted. tau: greedy
    and sampling."""

    recipe: Recipe
    hardware: Hardware
    target: TargetSizes
    drafter: DrafterSizes
    written: int
    stages: dict[str, Parts]
    tokens_seen: float
    tau: dict[str, ExpectedTau]

    @property
    def misfits(self) -> list[str]:
        """A line for each thing that does not fit, with the key to change."""
        found, memory = [], self.hardware.memory
        for stage, parts in self.stages.items():
            needed = sum(parts.values())
            if stage == "training" and not self.hardware.gpu:  # processes share a CPU's memory
                needed *= self.recipe.launch.devices
            if memory and needed > memory:
                sizes = f"{needed / GIB:.1f} GiB, a device has {memory / GIB:.1f}"
                found.append(f"{stage} takes {sizes}: {REMEDIES[stage]}")
        return found


def make_plan(recipe: Recipe, hardware: Hardware) -> TrainingPlan:
    """The plan without its time. Raises UserError: a target whose config is unavailable, or options
    that do not fit it."""
    options, trainer = recipe.target, recipe.trainer
    target = read_target_sizes(options.name, options.revision, options.trust_remote_code)
    drafter = plan_drafter_sizes(recipe, target)
    folder = recipe.data_folder
    written = read_manifest(folder)["samples"] if (folder / "manifest.json").is_file() else 0
    sizes = choose_number_sizes(recipe, hardware.gpu)
    stages = {
        "writing": plan_writing(recipe, target, sizes),
        "training": plan_training(recipe, target, drafter, sizes),
    }
    seen = trainer.max_steps * trainer.batch_size * recipe.data.length * FILL
    tau = {}
    for how in ("greedy", "sampling"):
        expected = predict_tau(drafter.kind, seen, drafter.drafted, how, target.spec)
        if expected is not None:
            tau[how] = expected
    return TrainingPlan(recipe, hardware, target, drafter, written, stages, seen, tau)


def render_plan(plan: TrainingPlan, seconds: dict[str, float] | None = None) -> str:
    """The plan as text. seconds: of each stage; None if no pilot ran."""
    values = {"plan": plan, "seconds": seconds, "gib": GIB, "clock": clock, "plural": plural}
    return render_page(Path(__file__).with_name("plan.jinja"), **values).rstrip("\n")
