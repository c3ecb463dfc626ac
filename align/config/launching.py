"""Starting the processes of a run with torchrun's launcher, unless another launcher has started
them."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence

from align.config.hardware import is_launched
from align.config.recipe import Recipe
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.common.text import say

RESUMES = "rerun the command to resume from the newest checkpoint"


def use_deterministic_products() -> None:
    """Make fp32 products on a CPU independent of the number of threads, at no measurable cost:
    MKL's default order of summation changes about one sampled text in eight. Call before torch is
    imported; an existing value of `MKL_CBWR` is kept."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def adopt_slurm() -> None:
    """Set torchrun's variables from srun's if srun has started several tasks."""
    env = os.environ
    if is_launched() or int(env.get("SLURM_STEP_NUM_TASKS") or 1) < 2 or "SLURM_PROCID" not in env:
        return
    nodes = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", env.get("SLURM_STEP_NODELIST") or "127.0.0.1")
    job = int(env.get("SLURM_JOB_ID") or 0) + int(env.get("SLURM_STEP_ID") or 0)
    env["RANK"] = env["SLURM_PROCID"]
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID") or "0"
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env["NODE_RANK"] = env.get("SLURM_NODEID") or "0"
    env.setdefault("MASTER_ADDR", nodes.partition(",")[0])
    env.setdefault("MASTER_PORT", str(15000 + job % 10000))


def thread_share(processes: int) -> int:
    """Threads of one of several processes on this machine."""
    return max(1, (os.cpu_count() or 1) // processes)


def run_processes(recipe: Recipe, module: str, arguments: Sequence[str]) -> int:
    """Run a command, named as `python -m` takes it, in one process per device of this machine, and
    end them all when one fails. Returns the exit code. Raises UserError: see `_choose_rendezvous`.
    """
    nodes, devices = recipe.launch.num_nodes, recipe.launch.devices
    rendezvous = _choose_rendezvous(nodes)
    os.environ.setdefault("OMP_NUM_THREADS", str(thread_share(devices)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable()  # the launcher reports each signal and exit code by several records

    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(nodes, nodes, nproc_per_node=devices, max_restarts=0, **rendezvous)
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except SignalException:
        return 130
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code in (2, 130):  # wrong input, interrupted: the process has printed its own message
            return code
        ended = failure.signal_name() if code < 0 else f"exit code {code}"
        say(f"error: rank {rank} of {recipe.processes} ended with {ended}; {RESUMES}", error=True)
        return 1
    return 0


def _choose_rendezvous(nodes: int) -> JsonObject:
    """How processes connect: through a free port on one machine, else through the environment's
    variables. Raises UserError if they are missing."""
    if nodes == 1:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(os.getpid())}
    env = os.environ
    missing = sorted({"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} - env.keys())
    if missing or not env["NODE_RANK"].isdecimal():
        raise UserError(
            f"launch.num_nodes={nodes}: missing {', '.join(missing) or 'a number in NODE_RANK'}; "
            f"start the command on every machine with NODE_RANK=0…{nodes - 1} and the first "
            "machine's MASTER_ADDR and MASTER_PORT (torchrun and srun set them)"
        )
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
        "rdzv_configs": {"rank": int(env["NODE_RANK"]), "timeout": 900},
        "run_id": "specalign",
    }
