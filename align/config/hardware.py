"""Processes, devices and packages that a recipe needs, what this machine has, and starting the
processes. Imports torch only to count GPUs and to launch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

from align.config.option import require
from align.config.recipe import Recipe
from specalign.common.text import say

RESUMES = "rerun the command to resume from the newest checkpoint"


def main_process() -> bool:
    """Whether this process prints and writes. Works before the processes are connected."""
    return os.environ.get("RANK", "0") == "0"


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
    """Raises UserError for missing GPUs, or for another number of processes than a launcher
    started."""
    launch, gpus = recipe.launch, gpu_count()
    wants_cuda = recipe.target.device.startswith("cuda")
    option = f"target.device={recipe.target.device}" if wants_cuda else "launch.accelerator=gpu"
    no_gpu = f"{option}: torch sees no GPU (launch.accelerator=cpu runs here)"
    require(gpus or not (wants_cuda or launch.accelerator == "gpu"), no_gpu)
    given = f"launch.devices={launch.devices}"
    is_there = accelerator(recipe) == "cpu" or launch.devices <= gpus
    require(is_there, f"{given}: torch sees {gpus} GPUs")
    world = int(os.environ["WORLD_SIZE"]) if is_launched() else recipe.processes
    started = f"launch.num_nodes={launch.num_nodes}: a launcher started {world} processes"
    require(world == recipe.processes, f"{given} × {started}")


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


# ---- launching: torchrun, unless another launcher has started the processes ----


def use_deterministic_products() -> None:
    """Make fp32 products on a CPU independent of the number of threads, at no measurable cost:
    MKL's default order of summation changes about one sampled text in eight. Call before torch is
    imported; an existing value of `MKL_CBWR` is kept."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def thread_share(processes: int) -> int:
    """Threads of one of several processes on this machine."""
    return max(1, (os.cpu_count() or 1) // processes)


def run_processes(recipe: Recipe, module: str, arguments: Sequence[str]) -> int:
    """Run a command, named as `python -m` takes it, in one process per device of this machine, and
    end them all when one fails. Returns the exit code. Raises UserError for several machines."""
    count = recipe.launch.devices
    nodes = f"launch.num_nodes={recipe.launch.num_nodes}: start the command with torchrun on every "
    require(recipe.launch.num_nodes == 1, f"{nodes}machine (docs/scale.md)")
    os.environ.setdefault("OMP_NUM_THREADS", str(thread_share(count)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable()  # the launcher reports each signal and exit code by several records

    from torch.distributed.elastic.multiprocessing import SignalException, errors
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        1,
        1,
        nproc_per_node=count,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except SignalException:
        return 130
    except errors.ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code in (2, 130):  # wrong input, interrupted: the process has printed its own message
            return code
        ended = failure.signal_name() if code < 0 else f"exit code {code}"
        say(f"error: rank {rank} of {count} ended with {ended}; {RESUMES}", error=True)
        return 1
    return 0
