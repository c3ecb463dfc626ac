"""The processes of a run on this machine: which one this is, starting the others, and ending all of them.

However they are started, RANK, WORLD_SIZE, LOCAL_RANK, NODE_RANK, MASTER_ADDR and MASTER_PORT say who is who. torchrun and the deepspeed
command set them; for SLURM's srun they are made from its own; a command as typed starts the processes of its machine itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from align.common.errors import UserError
from align.common.text import say
from align.config.recipe import Recipe

POLL = 0.5
"""Seconds between looks at the processes that this one started."""
LINGER = 1.0
"""Seconds that others get to end by themselves after an input that was refused here."""
PARENT = "SPECALIGN_STARTED_BY"
"""The environment variable that tells a process which one started it."""

_once = threading.Lock()
_started: list[subprocess.Popen[bytes]] = []


def round_alike() -> None:
    """Have fp32 products on a processor round alike with any number of threads; to be called before torch is imported.

    By default MKL adds up in another order where a product is split between threads, and one of eight sampled texts then
    goes another way. Its strict mode costs no measurable time; who has set `MKL_CBWR` keeps it.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def launched() -> bool:
    """Whether a launcher has started this process and says who it is."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


def adopt_slurm() -> None:
    """Where srun has started several tasks, say who is who as every other launcher does."""
    env = os.environ
    if launched() or int(env.get("SLURM_STEP_NUM_TASKS") or 1) < 2 or "SLURM_PROCID" not in env:
        return
    nodes = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", env.get("SLURM_STEP_NODELIST") or "127.0.0.1")
    job = int(env.get("SLURM_JOB_ID") or 0) + int(env.get("SLURM_STEP_ID") or 0)
    env |= {
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env.get("SLURM_LOCALID") or "0",
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "NODE_RANK": env.get("SLURM_NODEID") or "0",
        "MASTER_ADDR": env.get("MASTER_ADDR") or nodes.partition(",")[0],
        "MASTER_PORT": env.get("MASTER_PORT") or str(15000 + job % 10000),
    }


class Others:
    """The other processes that a recipe asks for on this machine, running the same command; none where a launcher has started them.

    As a context: they are waited for at its end, and end with it where it fails. One that dies ends the run.

    Args:
        module: the command, as `python -m` takes it. words: its words.

    Raises:
        UserError: several machines, and nothing says which one this is.
    """

    def __init__(self, recipe: Recipe, module: str, words: Sequence[str]) -> None:
        self.recipe, self.words = recipe, [sys.executable, "-m", module, *words]

    def __enter__(self) -> Others:
        if parent := os.environ.get(PARENT):
            threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
        if self.recipe.processes == 1 or launched():
            return self
        here, world = self.recipe.launch.devices, self.recipe.processes
        first = self._node() * here
        os.environ |= {"WORLD_SIZE": str(world), "RANK": str(first), "LOCAL_RANK": "0"}
        for local in range(1, here):
            env = {
                **os.environ,
                "RANK": str(first + local),
                "LOCAL_RANK": str(local),
                PARENT: str(os.getpid()),
            }
            env.setdefault("OMP_NUM_THREADS", str(threads(self.recipe)))
            env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its own stack where the first process is gone
            _started.append(subprocess.Popen(self.words, env=env, stdin=subprocess.DEVNULL))
        threading.Thread(target=_supervise, args=(first, world), daemon=True).start()
        return self

    def _node(self) -> int:
        """The number of this machine; sets what says where the first one is."""
        env, nodes = os.environ, self.recipe.launch.num_nodes
        if nodes == 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            env |= {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            return 0
        needed = {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} - env.keys()
        if needed or not env["NODE_RANK"].isdecimal():
            raise UserError(
                f"launch.num_nodes={nodes}: start the command on every machine with NODE_RANK=0…{nodes - 1}, and with MASTER_ADDR and "
                f"MASTER_PORT of the first (lacks {', '.join(sorted(needed)) or 'a number in NODE_RANK'}); torchrun and srun set them"
            )
        return int(env["NODE_RANK"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # what they meet too they would say too; else they may have something to write
        until = time.monotonic() + (LINGER if isinstance(error, UserError) else 60)
        started, _started[:] = [*_started], []
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()


def threads(recipe: Recipe) -> int:
    """Of the processor's threads a process's share."""
    return max(1, (os.cpu_count() or 1) // recipe.launch.devices)


def _supervise(first: int, world: int) -> None:
    while _started:
        for local, process in enumerate([*_started], 1):
            code = process.poll()
            if code not in (None, 0, 130) and process in _started:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                end_run(f"rank {first + local} of {world} ended with {how}")
        time.sleep(POLL)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    time.sleep(LINGER)  # it may have ended well, and this process is about to
    end_run("rank 0 has ended" if os.environ["LOCAL_RANK"] == "1" else None)


def end_run(line: str | None) -> None:
    """Say why, and end this process and those that it started, whatever they are waiting for: a thread's last resort."""
    if not _once.acquire(blocking=False):
        threading.Event().wait()  # another thread is at it
    if line is not None:
        with contextlib.suppress(OSError, ValueError):
            say(f"error: {line}; the same command goes on from the newest checkpoint", error=True)
    for process in _started:
        process.kill()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1)
