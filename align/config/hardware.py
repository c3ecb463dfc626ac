"""Processes, devices and packages that a recipe needs, and what this machine has. Imports torch
only to count GPUs."""

import os
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec

from align.config.option import require
from align.config.recipe import Recipe


def main_process() -> bool:
    """Whether this process prints and writes. Works before the processes are connected."""
    return os.environ.get("RANK", "0") == "0"


def is_launched() -> bool:
    """Whether a launcher (torchrun, deepspeed) has started this process and set its rank."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


def use_deterministic_products() -> None:
    """Make fp32 products on a CPU independent of the number of threads, at no measurable cost:
    MKL's default order of summation changes about one sampled text in eight. Call before torch is
    imported; an existing value of `MKL_CBWR` is kept."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def gpu_count() -> int:
    """GPUs that torch sees. The version of a CPU build answers without importing torch, which takes
    seconds."""
    with suppress(metadata.PackageNotFoundError):
        if metadata.version("torch").endswith("+cpu"):
            return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def accelerator(recipe: Recipe) -> str:
    """`cpu` or `gpu`."""
    device = recipe.target.device
    return "gpu" if device != "cpu" and (device != "auto" or gpu_count()) else "cpu"


def devices(recipe: Recipe) -> int | list[int]:
    """The number of devices to use on this machine, or the one GPU that the recipe names."""
    _, _, number = recipe.target.device.partition(":")
    return [int(number)] if number else recipe.launch.devices


def target_device(recipe: Recipe) -> str:
    """Where this process loads the target: each process on its own GPU."""
    if accelerator(recipe) == "cpu":
        return "cpu"
    chosen = devices(recipe)
    return f"cuda:{chosen[0] if isinstance(chosen, list) else os.environ.get('LOCAL_RANK') or 0}"


def check_packages(recipe: Recipe) -> None:
    """Raises UserError that names every missing package."""
    loggers: list[str] = [name for name in recipe.trainer.logger if name != "csv"]
    needed = {f"trainer.logger={name}": name for name in loggers}
    if recipe.launch.strategy.startswith("deepspeed"):
        needed[f"launch.strategy={recipe.launch.strategy}"] = "deepspeed"
    if recipe.drafter.lora_rank:
        needed[f"drafter.lora_rank={recipe.drafter.lora_rank}"] = "peft"
    missing = {option: name for option, name in needed.items() if find_spec(name) is None}
    names = " ".join(sorted({*missing.values()}))
    require(not missing, f"{', '.join(missing)}: not installed (pip install {names})")


def check_devices(recipe: Recipe) -> None:
    """Raises UserError for missing GPUs, or for another number of processes than a launcher
    started."""
    launch = recipe.launch
    if accelerator(recipe) == "gpu":
        gpus = gpu_count()
        no_gpu = f"target.device={recipe.target.device}: torch sees no GPU; use target.device=cpu"
        require(gpus, no_gpu)
        require(launch.devices <= gpus, f"launch.devices={launch.devices}: torch sees {gpus} GPUs")
    world = int(os.environ["WORLD_SIZE"]) if is_launched() else recipe.processes
    given = f"launch.devices={launch.devices} × launch.num_nodes={launch.num_nodes}"
    require(world == recipe.processes, f"{given}, but the launcher started {world} processes")
