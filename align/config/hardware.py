"""Processes, devices and packages that a recipe needs, and what this machine has. Imports torch
only to count GPUs."""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec

from align.config.option import require
from align.config.recipe import Recipe


def main_process() -> bool:
    """Whether this process prints and writes. Works before the processes are connected."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    return rank == "0" and (os.environ.get("NODE_RANK") or "0") == "0"


def gpu_count() -> int:
    """GPUs that torch sees. The version of a CPU build answers without importing torch, which takes
    seconds."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return 0
    except metadata.PackageNotFoundError:
        pass
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def accelerator(recipe: Recipe) -> str:
    """`cpu` or `gpu`."""
    if recipe.launch.accelerator != "auto":
        return recipe.launch.accelerator
    return "gpu" if recipe.target.device != "cpu" and gpu_count() else "cpu"


def check_packages(recipe: Recipe) -> None:
    """Raises UserError that names every missing package."""
    needed = {f"trainer.logger={name}": name for name in recipe.trainer.logger if name != "csv"}
    if recipe.launch.strategy.startswith("deepspeed"):
        needed[f"launch.strategy={recipe.launch.strategy}"] = "deepspeed"
    if recipe.drafter.lora_rank:
        needed[f"drafter.lora_rank={recipe.drafter.lora_rank}"] = "peft"
    missing = {option: name for option, name in needed.items() if find_spec(name) is None}
    names = " ".join(sorted({*missing.values()}))
    require(not missing, f"{', '.join(missing)}: not installed (pip install {names})")


def check_devices(recipe: Recipe) -> None:
    """Raises UserError for a GPU that is missing, or for more processes than this machine can run
    or a launcher started."""
    launch, gpus = recipe.launch, gpu_count()
    wants_cuda = recipe.target.device.startswith("cuda")
    option = f"target.device={recipe.target.device}" if wants_cuda else "launch.accelerator=gpu"
    needs_gpu = launch.accelerator == "gpu" or wants_cuda
    no_gpu = f"{option}: torch sees no GPU (launch.accelerator=cpu runs here)"
    require(gpus or not needs_gpu, no_gpu)
    given = f"launch.devices={launch.devices}"
    if accelerator(recipe) == "gpu":
        require(launch.devices <= gpus, f"{given}: torch sees {gpus} GPUs")
    else:
        most = 4 * (os.cpu_count() or 1)
        require(launch.devices <= most, f"{given}: at most {most} processes on this CPU")
    if is_launched():
        world = int(os.environ["WORLD_SIZE"])
        nodes = f"launch.num_nodes={launch.num_nodes}"
        started = f"{given} × {nodes}: a launcher started {world} processes"
        require(world == recipe.processes, started)


def is_launched() -> bool:
    """Whether a launcher has started this process and set its rank."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


def devices(recipe: Recipe) -> int | list[int]:
    """The number of devices to use on this machine, or the one GPU that the recipe names."""
    kind, _, number = recipe.target.device.partition(":")
    return [int(number)] if kind == "cuda" and number else recipe.launch.devices


def target_device(recipe: Recipe) -> str:
    """Where this process loads the target: each process on its own GPU."""
    if accelerator(recipe) == "cpu":
        return "cpu"
    chosen = devices(recipe)
    return f"cuda:{chosen[0] if isinstance(chosen, list) else os.environ.get('LOCAL_RANK') or 0}"
