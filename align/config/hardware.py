"""What a recipe asks of the machine, and what the machine has: processes, devices, packages. torch is asked only about GPUs."""

from __future__ import annotations

import os
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from align.common.errors import UserError, check_all
from align.config.recipe import Recipe


def main_process() -> bool:
    """Whether this is the process that prints and writes: known before the processes know each other."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    return rank == "0" and (os.environ.get("NODE_RANK") or "0") == "0"


def process_number() -> int:
    """The number of this process among those of a run, known before they know each other."""
    if rank := os.environ.get("RANK"):
        return int(rank)
    return 64 * int(os.environ.get("NODE_RANK") or 0) + int(os.environ.get("LOCAL_RANK") or 0)


def gpu_count() -> int:
    """GPUs that torch sees; the CPU build sees none, which its version says without seconds of importing it."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return 0
    except metadata.PackageNotFoundError:
        pass
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def accelerator(recipe: Recipe) -> str:
    """cpu or gpu.

    Raises:
        UserError: a GPU, or more of them, than this machine has; a package that is missing; devices that contradict.
    """
    launch, device = recipe.launch, recipe.target.device
    check_packages(recipe)
    name = launch.accelerator
    if name == "auto":
        name = "gpu" if device != "cpu" and gpu_count() else "cpu"
    if name == "gpu" and not gpu_count():
        raise UserError(
            "launch.accelerator=gpu was asked for, but torch sees no GPU (launch.accelerator=cpu runs here)"
        )
    if name == "gpu" and launch.devices > gpu_count():
        raise UserError(f"launch.devices={launch.devices}: torch sees {gpu_count()} GPUs")
    if device != "auto" and (device == "cpu") != (name == "cpu"):
        raise UserError(
            f"target.device={device} contradicts launch.accelerator={launch.accelerator}; leave it at auto"
        )
    outside = os.environ.get("WORLD_SIZE") if "RANK" in os.environ and "LOCAL_RANK" in os.environ else None
    if outside is not None and int(outside) != recipe.processes:
        raise UserError(
            f"launch.devices={launch.devices} × launch.num_nodes={launch.num_nodes}: {outside} processes were launched from outside"
        )
    return name


def check_packages(recipe: Recipe) -> None:
    """Raises UserError that names every package that the recipe asks for and that is not installed."""
    needed: list[tuple[str, str]] = []
    if recipe.launch.strategy.startswith("deepspeed"):
        needed.append(("deepspeed", f"launch.strategy={recipe.launch.strategy}"))
    needed += [
        (name, f"trainer.logger={name}") for name in ("tensorboard", "wandb") if name in recipe.trainer.logger
    ]
    if recipe.drafter.lora_rank:
        needed.append(("peft", f"drafter.lora_rank={recipe.drafter.lora_rank}"))
    check_all(partial(_need, *pair) for pair in needed)


def _need(package: str, asked_by: str) -> None:
    if find_spec(package) is None:
        raise UserError(f"{asked_by}: the package {package} is not installed here (pip install {package})")


def check_processes(recipe: Recipe) -> None:
    """Raises UserError for more processes on a CPU than it could ever run."""
    most, count = 4 * (os.cpu_count() or 1), recipe.launch.devices
    if accelerator(recipe) == "cpu" and count > most:
        raise UserError(f"launch.devices={count}: at most {most} processes on this machine's CPU")


def devices(recipe: Recipe) -> int | list[int]:
    """How many devices this machine is to use, or the one GPU that the recipe names."""
    kind, _, number = recipe.target.device.partition(":")
    if kind != "cuda" or not number:
        return recipe.launch.devices
    if recipe.launch.devices > 1:
        raise UserError(
            f"target.device={recipe.target.device} names one GPU, launch.devices={recipe.launch.devices}"
        )
    return [int(number)]


def target_device(recipe: Recipe) -> str:
    """Where this process loads the target: each process on a GPU of its own."""
    if accelerator(recipe) == "cpu":
        return "cpu"
    chosen = devices(recipe)
    return f"cuda:{chosen[0] if isinstance(chosen, list) else os.environ.get('LOCAL_RANK') or 0}"


def target_place(recipe: Recipe) -> dict[str, Any]:
    """What `load_target` is told of where training's target is: one in parts begins on the host, as transformers made it."""
    if recipe.target.parallel == "replicate":
        return {"device": target_device(recipe)}
    return {"device": "cpu", "fast": False}
