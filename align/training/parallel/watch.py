"""A process of a run that dies or hangs ends the run, with one line.

Processes that compute together wait for each other: for one that is gone they would wait until the process group's own limit, half an hour.
Beside training, a thread in every process tells the main one every second that it lives and how far it has come. It needs no
collective, so it goes on where training does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from align.config.launching import end_run
from align.config.recipe import Recipe
from align.training.base_module import NonFiniteLoss

TICK = 1.0
"""Seconds between two signs of life."""
SILENT, BROKEN = 20.0, 5.0
"""Seconds without a sign of life after which a process counts as gone, and where a connection broke."""
PATIENCE = 10
"""How many times as long the first step, which compiles and allocates, and the writing of a file may take."""
SLOWEST = 5
"""A run counts as hanging after so many times its longest way from one beat to the next."""


_BROKEN_OFF = ("onnection", "NCCL", "gloo", "roken pipe", "Socket")
"""Words of errors that another process's end causes."""


class Beats:
    """How far this process has come: every part of a step is a beat."""

    def __init__(self) -> None:
        self.count, self.patient, self.longest = 0, 1, 0.0  # patient: the first step is still to come
        self.at: float | None = None

    def beat(self) -> None:
        now = time.monotonic()
        if self.at is not None and not self.patient:
            self.longest = max(self.longest, now - self.at)
        self.count, self.at = self.count + 1, now

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """What takes its time without a beat."""
        self.patient += 1
        try:
            yield
        finally:
            self.patient -= 1
            self.at = time.monotonic()


class Interrupted(RuntimeError):
    """A signal asked training to stop; a checkpoint was saved."""


class Watch(Callback):
    """Watches the processes of a run from the time that they know each other until training ends.

    Args:
        recipe: `launch.timeout` is read, and `data.follow`, whose waiting for text is no hanging.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.limit, self.waits = recipe.launch.timeout, recipe.data.follow
        self.beats = Beats()
        self._stopped, self._broken = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()
        self._failed: str | None = None
        self._step, self._begun, self._clock, self._rounds = 0, False, 0.0, 0

    # ---- its life ----

    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        self.rank, self.world = trainer.global_rank, trainer.world_size
        if self.world == 1:
            return
        wait = timedelta(seconds=SILENT)
        port = None
        if self.rank == 0:
            store = TCPStore("0.0.0.0", 0, None, True, wait, wait_for_workers=False)
            port = store.port
        port = trainer.strategy.broadcast(port)
        if self.rank:
            store = TCPStore(os.environ.get("MASTER_ADDR") or "127.0.0.1", int(port or 0), None, False, wait)
        self._store = store
        self._tell(over=False)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        if self.rank:
            threading.Thread(target=self._guard, name="guard", daemon=True).start()

    def teardown(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        """Training is over: what comes after it is the main process's alone."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        """An error that another process's end has caused is not what the user is told."""
        if self._thread is None:
            return
        text = " ".join(str(exception).split())
        if isinstance(exception, RuntimeError) and any(word in text for word in _BROKEN_OFF):
            self._broken.set()
            self._thread.join(2 * SILENT)  # it ends the process, unless all others are there
            return
        if not isinstance(exception, Interrupted | NonFiniteLoss | KeyboardInterrupt):
            self._failed = f"{type(exception).__name__}: {text}"[:300]
        self.teardown(trainer, pl_module, "fit")

    # ---- how far training has come ----

    def _beat(self, trainer: lightning.Trainer) -> None:
        self._step = trainer.global_step
        self.beats.beat()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._beat(trainer)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._beat(trainer)

    def on_before_backward(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._beat(trainer)

    def on_after_backward(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._beat(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._beat(trainer)
        if not self._begun:
            self._begun = True
            self.beats.patient -= 1

    def on_validation_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._beat(trainer)

    def on_validation_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._beat(trainer)

    # ---- the thread ----

    def _run(self) -> None:
        judge = Judge(self.world, self.limit, self.waits)
        last = time.monotonic()
        while True:
            over = self._stopped.wait(TICK)
            # a thread that was held up itself has no right to call the others late
            now = time.monotonic()
            self._clock, last = self._clock + min(now - last, 2 * TICK), now
            try:
                self._tell(over)
                if over:
                    return
                line = self._heard(judge)
            except Exception:  # the store went with its process
                if self._stopped.is_set():
                    return
                line = lost(0, self.world, self._step)
            self._rounds += 1
            if line is not None:
                end_run(line if self.rank in (0, 1) else None)
                return

    def _guard(self) -> None:
        """The store is the main process's, and a request to it waits without end where that one, or its machine, stands still."""
        held, rounds, last = 0.0, -1, time.monotonic()
        while not self._stopped.wait(TICK) and held <= SILENT:
            now = time.monotonic()
            held, last = held + min(now - last, 2 * TICK) if self._rounds == rounds else 0.0, now
            rounds = self._rounds
        if not self._stopped.is_set():
            end_run(lost(0, self.world, self._step) if self.rank == 1 else None)

    def _tell(self, over: bool) -> None:
        b = self.beats
        late = b.at is not None and time.monotonic() - b.at > self.limit / 3
        sign = {
            "time": time.monotonic(), "beats": b.count, "patient": b.patient > 0, "longest": b.longest, "step": self._step,
            "over": over, "failed": self._failed, "place": place(self._main) if late else None,
        }  # fmt: skip
        self._store.set(f"sign/{self.rank}", json.dumps(sign))

    def _heard(self, judge: Judge) -> str | None:
        """What ended the run, if anything did. The main process judges; it is judged by the others."""
        silent = BROKEN if self._broken.is_set() else SILENT
        for rank in range(self.world) if self.rank == 0 else (0,):
            if self._store.check([f"sign/{rank}"]):
                judge.hear(rank, json.loads(self._store.get(f"sign/{rank}")), self._clock)
        if self.rank:
            if self._store.check(["verdict"]) or judge.signs.get(0, {}).get("failed"):
                end_run(None)
            return judge.gone((0,), silent, self._clock)
        line = judge.verdict(silent, self._clock)
        if line is not None:
            self._store.set("verdict", line)
            self._stopped.wait(2 * TICK)  # the others hear of it before this process ends
        return line


class Judge:
    """What signs of life mean; `hear` takes them with the time at which they were heard, on one clock."""

    def __init__(self, world: int, limit: float, waits: bool = False) -> None:
        self.world, self.limit, self.waits = world, limit, waits
        self.signs: dict[int, dict[str, Any]] = {}
        self._new: dict[int, float] = {}
        self._moved = 0.0

    def hear(self, rank: int, sign: dict[str, Any], now: float) -> None:
        before = self.signs.get(rank)
        if before is None or before["time"] != sign["time"]:
            self._new[rank] = now
        if before is None or before["beats"] != sign["beats"]:
            self._moved = now
        self.signs[rank] = sign

    def verdict(self, silent: float, now: float) -> str | None:
        """Why the run is over; None = it goes on."""
        for rank, sign in sorted(self.signs.items()):
            if sign["failed"] and rank:
                return f"rank {rank} of {self.world} ended: {sign['failed']}"
        return self.gone(range(1, self.world), silent, now) or self._hanging(now)

    def gone(self, ranks: Any, silent: float, now: float) -> str | None:
        for rank in ranks:
            sign = self.signs.get(rank)
            if sign is None or sign["over"]:
                continue
            # reading and writing checkpoints may hold up a whole process
            if now - self._new[rank] > (3 * silent if sign["patient"] and silent == SILENT else silent):
                return lost(rank, self.world, max(s["step"] for s in self.signs.values()))
        return None

    def _hanging(self, now: float) -> str | None:
        signs = self.signs.values()
        if self.waits or len(signs) < self.world or any(s["over"] for s in signs):
            return None
        if any(now - heard > BROKEN for heard in self._new.values()):
            return None  # one that is silent does not hang: it lives or is gone, which more silence will say
        limit = self.limit * (PATIENCE if any(s["patient"] for s in signs) else 1)
        idle = now - self._moved
        if idle <= max(limit, SLOWEST * max(s["longest"] for s in signs)):
            return None
        step = max(s["step"] for s in signs)
        after = f"gone on for {idle:.0f} s after step {step}"
        at = {rank: s["place"] for rank, s in sorted(self.signs.items()) if s["place"] and s["place"][1]}
        if not at:
            return f"none of the {self.world} processes has {after}: all wait for each other"
        rank, (where, _) = next(iter(at.items()))
        return f"rank {rank} of {self.world} has not {after} (it is at {where}), and the others wait for it"


def lost(rank: int, world: int, step: int) -> str:
    return f"rank {rank} of {world} has died or does not answer, after step {step}"


def place(thread: int) -> tuple[str, bool] | None:
    """Where a thread is, and whether it is busy there and not waiting for other processes."""
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None:
        return None
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    waits = any(part in file for part in ("/torch/distributed/", "/deepspeed/comm/")) or name in (
        "_engine_run_backward",
    )
    return f"{'/'.join(file.split('/')[-3:])}:{frame.f_lineno} in {name}", not waits


def patiently(trainer: lightning.Trainer) -> contextlib.AbstractContextManager[None]:
    """What takes its time without a step: writing files."""
    found = next((c for c in trainer.callbacks if isinstance(c, Watch)), None)  # type: ignore[attr-defined]
    return contextlib.nullcontext() if found is None else found.beats.patiently()
