"""Batches that several processes of this machine write, each with the target on a device of its own.

A batch's rows depend on its number alone, so who writes which is left to who is free; they are handed on in the order of their
numbers, and the samples are those of one process. The process that hands on holds no weights.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from align.common.errors import UserError
from align.config.hardware import accelerator, check_processes, devices
from align.config.recipe import Recipe
from align.target.loading import load_target
from align.writing.generation import Row
from align.writing.in_process import InProcess
from align.writing.outline import Outline
from align.writing.rows import Plan, Progress, unheard


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    batch: int | None = None
    """Which it writes."""
    is_told: bool = False
    """Whether it was sent the template and the prompts, which may be many."""


class Processes:
    """As many processes as `launch.devices`, which load the target at once.

    Raises:
        UserError: the target can't be loaded, or fewer devices are here.
    """

    def __init__(self, recipe: Recipe, work: Callable[..., None] | None = None) -> None:
        self.recipe, self.about, count = recipe, dict[str, str](), recipe.launch.devices
        kind = accelerator(recipe)
        devices(recipe)  # refuses one GPU by name
        check_processes(recipe)
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._done: dict[int, list[Row]] = {}
        self._next = 0
        try:
            for number in range(count):
                ours, theirs = context.Pipe()
                device = f"cuda:{number}" if kind == "gpu" else "cpu"
                words = (theirs, recipe, device, count)
                process = context.Process(target=work or _work, args=words, daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))
            self.target: Outline = [self._heard(worker) for worker in self._workers][0]
        except BaseException:
            self.close()
            raise

    def source(self, plan: Plan) -> Processes:
        """These processes as the source of a plan's rows; the plan must be the recipe's, over `target`."""
        self.plan = plan
        return self

    def write(self, number: int, needed: int, progress: Progress = unheard) -> list[Row] | None:
        self._next = max(self._next, number)
        while number not in self._done:
            if not self._begin(number, needed) and not any(w.batch is not None for w in self._workers):
                return None
            for pipe in wait([w.pipe for w in self._workers if w.batch is not None]):
                worker = next(w for w in self._workers if w.pipe is pipe)
                rows = self._heard(worker)
                assert worker.batch is not None
                self._done[worker.batch], worker.batch = rows, None
                progress(sum(len(row.tokens) for row in rows), len(rows))
        self._begin(number, needed)
        return self._done.pop(number)

    def _begin(self, number: int, needed: int) -> bool:
        """Give batches to who is free: `number`, where nobody has it, and those behind it that are needed for certain. False
        where nothing was begun."""
        begun = False
        for worker in self._workers:
            if worker.batch is not None:
                continue
            written = {*self._done, *(w.batch for w in self._workers if w.batch is not None)}
            ahead = [n for n in written if n >= number]
            if number not in written:
                batch = number
            elif len(ahead) < 2 * len(self._workers) and self._rows(ahead) < needed:
                batch = self._next
            else:
                break
            if self._size(batch) == 0:
                break
            worker.batch = batch
            self._next = max(self._next, batch + 1)
            self._tell(worker, batch)
            begun = True
        return begun

    def _rows(self, batches: list[int]) -> int:
        return sum(map(self._size, batches))

    def _size(self, batch: int) -> int:
        """Rows of a batch: fewer in that of the last prompt, none behind it."""
        size, prompts = self.recipe.data.batch_size, self.plan.prompts
        return size if prompts is None else max(0, min(size, len(prompts) - batch * size))

    def _tell(self, worker: _Worker, batch: int) -> None:
        try:
            plan = None if worker.is_told else (self.plan.template, self.plan.prompts)
            worker.pipe.send((batch, plan))
            worker.is_told = True
        except OSError:
            raise self._ended(worker) from None

    def _heard(self, worker: _Worker) -> Any:
        """What a process says next. Raises UserError for what it could not do, or where it has ended."""
        try:
            good, found = worker.pipe.recv()
        except (EOFError, OSError):
            raise self._ended(worker) from None
        if not good:
            raise UserError(found)
        return found

    def _ended(self, worker: _Worker) -> UserError:
        worker.process.join(5)
        code = worker.process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return UserError(
            f"launch.devices={len(self._workers)}: one of the processes that write ended {how} (out of memory?); what is written stays"
        )

    def forget(self, number: int) -> None:
        pass

    def close(self) -> None:
        """End the processes; what they were writing is lost."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()


def _work(pipe: Connection, recipe: Recipe, device: str, count: int) -> None:
    """What each process does: load the target, say what it is, write the batches that are asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    if not os.environ.get("OMP_NUM_THREADS"):  # who says how many wants products that round alike
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    try:
        target = load_target(recipe.target.name, device=device, **recipe.target_options)
        pipe.send((True, Outline.of(target)))
    except (UserError, OSError, MemoryError) as error:
        pipe.send((False, str(error) or "out of memory"))
        return
    source = None
    while True:
        try:
            batch, given = pipe.recv()
        except EOFError:
            return
        try:
            if source is None:
                template, prompts = given
                source = InProcess(Plan(recipe, target, template, prompts), target)
            pipe.send((True, source.write(batch, 0, unheard)))
        except (UserError, OSError, MemoryError) as error:
            pipe.send((False, str(error) or "out of memory"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
