"""Commands in processes forked from one that has imported torch, Lightning and DeepSpeed, which takes ten seconds."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
LIMIT_S = 600
PRELOADED = [
    "torch", "transformers.models.llama.modeling_llama", "datasets", "lightning.pytorch", "deepspeed", "align.train",
    "align.training.run", "align.outputs.cache", "align.data.synthesis", "decode.evaluation.session", "decode.systems.load",
    "decode.evaluation.page", "decode.exporting.exports",
]  # fmt: skip


@cache
def fork_server() -> ForkServerContext:
    """Processes from it have imported what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    own = dict(os.environ)
    os.environ |= {**ONE_THREAD, "DS_ACCELERATOR": "cpu"}
    try:
        ensure_running()
    finally:
        os.environ.clear()
        os.environ |= own
    return context


def train_in_forks(
    words: Sequence[str], cwd: Path, processes: int = 1, plant: str = ""
) -> CompletedProcess[str]:
    """`python -m align.train` with these words, as a launcher starts it: one process for each rank. What rank 0 did.

    `plant`: `RANK HOW`, what that rank does in its fourth step: dies, stops, sleeps, fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(processes):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        env = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if processes > 1 else {}
        outputs = (str(cwd / f"stdout.{rank}"), str(cwd / f"stderr.{rank}"))
        arguments = (list(words), str(cwd), env, outputs, plant)
        ranks.append(fork_server().Process(target=_train, args=arguments))
        ranks[-1].start()
    for rank, process in enumerate(ranks):
        planted = plant.startswith(f"{rank} ")
        process.join(0 if planted else LIMIT_S)  # one that hangs hangs until the others are gone
        if not planted and process.is_alive():
            _where(ranks)
            said = "\n".join(f"-- rank {i}\n{_said(cwd, i)}" for i in range(processes))
            raise AssertionError(f"rank {rank} has not ended after {LIMIT_S} s\n{said}")
    for process in ranks:
        process.join(2)
        process.kill()
        process.join()
    code = ranks[0].exitcode or next((p.exitcode for p in ranks if p.exitcode), 0)
    texts = [(cwd / f"{stream}.0").read_text() for stream in ("stdout", "stderr")]
    return CompletedProcess(list(words), code, *texts)


def _where(ranks: Sequence[BaseProcess]) -> None:
    """Every process that lives writes its threads' stacks to its stderr, and is killed."""
    for process in ranks:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(2)
    for process in ranks:
        process.kill()
        process.join()


def _said(cwd: Path, rank: int) -> str:
    return (cwd / f"stdout.{rank}").read_text() + (cwd / f"stderr.{rank}").read_text()


def _train(
    words: list[str], cwd: str, env: Mapping[str, str], outputs: tuple[str, str], plant: str
) -> None:
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1)
    os.chdir(cwd)
    os.environ |= {**ONE_THREAD, **env}
    from align.train import main

    if plant.startswith(f"{env.get('RANK')} "):
        _plant(plant.split()[1])
    main(words)


def _plant(how: str) -> None:

    from align.training.block_module import BlockDrafterModule

    step = BlockDrafterModule.draft_statistics

    def planted(module: BlockDrafterModule, *args: Any) -> Any:
        if module.global_step == 3:
            if how == "fails":
                raise RuntimeError("planted")
            if how == "sleeps":
                time.sleep(LIMIT_S)
            if how == "stops":
                time.sleep(2)
            os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[how])
        return step(module, *args)

    BlockDrafterModule.draft_statistics = planted  # type: ignore[method-assign,assignment]
