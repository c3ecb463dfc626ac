"""Batches written by several processes of this machine, each with the target on its own device.

A batch's rows depend on its number alone, so the samples are those of one process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from align.common.errors import UserError
from align.config.hardware import accelerator, check_processes, devices
from align.config.recipe import Recipe
from align.target.loading import load_target
from align.target.model import Target
from align.writing.generation import Row
from align.writing.in_process import InProcess
from align.writing.outline import Outline, open_beside_server
from align.writing.rows import Plan, Progress, Source, ignore_progress
from align.writing.template import TargetInfo


@contextmanager
def open_writer(recipe: Recipe) -> Iterator[tuple[TargetInfo, Callable[[Plan], Source] | None]]:
    """The target, and what opens a plan's source if that is neither this process nor a server.

    Raises:
        UserError: the target cannot be loaded, or not on this many devices.
    """
    if recipe.data.server is not None:
        yield open_beside_server(recipe), None
    elif recipe.launch.devices == 1:
        yield load_target(recipe.target.name, device=recipe.target.device, **recipe.target_options), None
    else:
        with closing(Processes(recipe)) as processes:
            yield processes.target, processes.open_source


class Processes(Source):
    """Rows that `launch.devices` processes write.

    Raises:
        UserError: the target cannot be loaded, or there are fewer devices.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.count = recipe.launch.devices
        kind = accelerator(recipe)
        devices(recipe)  # refuses a single named GPU
        check_processes(recipe)
        context = multiprocessing.get_context("spawn")
        names = context.Queue()
        for number in range(self.count):
            names.put(f"cuda:{number}" if kind == "gpu" else "cpu")
        self._folder = tempfile.TemporaryDirectory(prefix="specalign-writing-")
        self._plan_file = Path(self._folder.name) / "plan.pickle"
        arguments = (recipe, names, self.count, self._plan_file)
        self._pool = ProcessPoolExecutor(self.count, context, _start_worker, arguments)
        self._batches: dict[int, Future[list[Row]]] = {}
        try:
            outlines = [self._pool.submit(_describe_target) for _ in range(self.count)]
            self.target = [self._result(outline) for outline in outlines][0]
        except BaseException:
            self.close()
            raise

    def open_source(self, plan: Plan) -> Processes:
        """The source of a plan's rows; the plan must be the recipe's, over `target`."""
        self.plan = plan
        self._plan_file.write_bytes(pickle.dumps((plan.template, plan.prompts)))
        return self

    def write(self, number: int, needed: int, progress: Progress = ignore_progress) -> list[Row] | None:
        if self._size(number) == 0:
            return None
        self._submit(number, max(needed, 1))
        rows: list[Row] = self._result(self._batches[number])
        del self._batches[number]
        self._submit(number + 1, needed - self._size(number))
        progress(sum(len(row.tokens) for row in rows), len(rows))
        return rows

    def _submit(self, number: int, needed: int) -> None:
        """Submit batches from `number` on, as far as they are needed for certain."""
        for batch in range(number, number + 2 * self.count):
            if needed <= 0 or self._size(batch) == 0:
                return
            if batch not in self._batches:
                self._batches[batch] = self._pool.submit(_write_batch, batch)
            needed -= self._size(batch)

    def _size(self, batch: int) -> int:
        """Rows of a batch: fewer in the one of the last prompt, none after it."""
        size = self.recipe.data.batch_size
        prompts = self.plan.prompts
        return size if prompts is None else max(0, min(size, len(prompts) - batch * size))

    def _result(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except BrokenProcessPool:
            raise UserError(
                f"launch.devices={self.count}: a writing process died (out of memory?); "
                "what is written stays, rerun the command to resume"
            ) from None

    def close(self) -> None:
        """End the processes; batches that are being written are lost."""
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()


class _Worker:
    """The state of a worker process."""

    target: Target
    error: Exception | None = None
    source: InProcess | None = None
    recipe: Recipe
    plan_file: Path


def _start_worker(recipe: Recipe, names: Any, count: int, plan_file: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    _Worker.recipe = recipe
    _Worker.plan_file = plan_file
    try:
        _Worker.target = load_target(recipe.target.name, device=names.get(), **recipe.target_options)
    except (UserError, OSError, MemoryError) as error:
        _Worker.error = error  # an error here would only say that the pool is broken


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _loaded_target() -> Target:
    if _Worker.error is not None:
        raise _Worker.error
    return _Worker.target


def _describe_target() -> Outline:
    return Outline.of(_loaded_target())


def _write_batch(number: int) -> list[Row]:
    if _Worker.source is None:
        template, prompts = pickle.loads(_Worker.plan_file.read_bytes())
        plan = Plan(_Worker.recipe, _loaded_target(), template, prompts)
        _Worker.source = InProcess(plan, _Worker.target)
    rows = _Worker.source.write(number, 0, ignore_progress)
    assert rows is not None
    return rows
