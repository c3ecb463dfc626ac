"""Cases one after another, each in a worker process, which is replaced when a case ends it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

from align.common.text import say

AT_MOST = 24 << 30
"""Bytes of addresses that a worker may take: a case that asks for more must not end other processes of the machine."""
LIMIT_S = 120
"""A case that takes longer hangs."""


def fuzz(
    scratch: Path, seed: int, minutes: float, cases: int | None = None, first: int = 0
) -> tuple[int, list[str]]:
    """Run cases until the time is over, or so many; their number, and what went wrong."""
    findings: list[str] = []
    begun = time.monotonic()
    end = begun + 60 * minutes
    worker = None
    number = first
    while number < first + cases if cases is not None else time.monotonic() < end:
        worker = worker or Worker(scratch / str(number), seed)
        found = worker.ask(number)
        if worker.process.exitcode is not None or not worker.process.is_alive():
            worker = None
        if found:
            findings.append(f"case {number}: {found}")
            say(findings[-1], error=True)
        number += 1
        if (number - first) % 500 == 0:
            past = time.monotonic() - begun
            say(f"{number - first} cases, {len(findings)} findings, {past:.0f} s", error=True)
    if worker is not None:
        worker.stop()
    return number - first, findings


class Worker:
    """A process that runs one case after another."""

    def __init__(self, folder: Path, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, folder, seed), daemon=False)
        self.process.start()
        theirs.close()
        self.pipe.recv()  # the corpus is made

    def ask(self, number: int) -> str:
        """What went wrong in a case, or nothing."""
        self.pipe.send(number)
        try:
            for _ in range(
                LIMIT_S
            ):  # seconds in which this process runs: it may be stopped meanwhile, as its worker is
                if self.pipe.poll(1):
                    return str(self.pipe.recv())
        except EOFError:
            self.process.join()
            return f"ended the process (exit code {self.process.exitcode})"
        self.stop()
        return f"hangs (more than {LIMIT_S} s)"

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def serve(pipe: Connection, folder: Path, seed: int) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
    from tests.fuzz.cases import Corpus, run

    resource.setrlimit(resource.RLIMIT_AS, (AT_MOST, AT_MOST))
    corpus = Corpus(folder)
    pipe.send("ready")
    while True:
        pipe.send(run(corpus, seed, pipe.recv()))
