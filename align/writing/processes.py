"""Batches written by several processes of this machine, each with the target on its own device.

A batch's rows depend on its number alone, so the samples are those of one process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from typing import Any

import torch

from align.config.hardware import accelerator
from align.config.recipe import Recipe
from align.writing.in_process import InProcess
from align.writing.outline import Outline, open_beside_server
from align.writing.rows import Plan, Progress, Row, Source, ignore_progress
from align.writing.template import TargetInfo, Template
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target


@contextmanager
def open_writer(recipe: Recipe) -> Iterator[tuple[TargetInfo, Callable[[Plan], Source] | None]]:
    """The target, and what opens a plan's source if that is neither this process nor a server.

    Raises:
        UserError: the target cannot be loaded, or not on this many devices.
    """
    if recipe.data.server is not None:
        yield open_beside_server(recipe), None
    elif recipe.launch.devices == 1:
        name, device = recipe.target.name, recipe.target.device
        yield load_target(name, device=device, **recipe.target_options), None
    else:
        with closing(Processes(recipe)) as processes:
            yield processes.target, processes.open_source


class Processes(Source):
    """Rows that `launch.devices` processes write.

    Raises:
        UserError: the target cannot be loaded, or there are fewer devices.
    """

    plan: Plan

    def __init__(self, recipe: Recipe) -> None:
        self.count = recipe.launch.devices
        is_gpu = accelerator(recipe) == "gpu"
        context = multiprocessing.get_context("spawn")
        names = context.Queue()
        for number in range(self.count):
            names.put(f"cuda:{number}" if is_gpu else "cpu")
        self._pool = ProcessPoolExecutor(self.count, context, _start_worker, (recipe, names))
        self._batches: dict[int, Future[list[Row]]] = {}
        try:
            outlines = [self._pool.submit(_describe_target) for _ in range(self.count)]
            self.target = [self._wait(outline) for outline in outlines][0]
        except BaseException:
            self.close()
            raise

    def open_source(self, plan: Plan) -> Processes:
        """The source of a plan's rows; the plan must be the recipe's, over `target`."""
        self.plan = plan
        return self

    def write(
        self, number: int, needed: int, progress: Progress = ignore_progress
    ) -> list[Row] | None:
        batch_size = self.plan.recipe.data.batch_size
        ahead = min(2 * self.count, max(1, -(-needed // batch_size)))
        for later in range(number, number + ahead):
            rows = [] if later in self._batches else self.plan.rows(later)
            if rows:
                job = self._pool.submit(_write_batch, self.plan.template, later, rows)
                self._batches[later] = job
        if number not in self._batches:
            return None
        written: list[Row] = self._wait(self._batches.pop(number))
        progress(sum(len(row.tokens) for row in written), len(written))
        return written

    def _wait(self, future: Future[Any]) -> Any:
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


class _Worker:
    """The state of a worker process."""

    recipe: Recipe
    target: Target | None = None
    error: Exception | None = None


def _start_worker(recipe: Recipe, names: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, torch.get_num_threads() // recipe.launch.devices))
    _Worker.recipe = recipe
    name, options = recipe.target.name, recipe.target_options
    try:
        _Worker.target = load_target(name, device=names.get(), **options)
    except (UserError, OSError, MemoryError) as error:
        _Worker.error = error  # raised here it would only break the pool


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _loaded_target() -> Target:
    if _Worker.target is None:
        assert _Worker.error is not None
        raise _Worker.error
    return _Worker.target


def _describe_target() -> Outline:
    return Outline.of(_loaded_target())


def _write_batch(template: Template, number: int, rows: list[Row]) -> list[Row]:
    target = _loaded_target()
    source = InProcess(Plan(_Worker.recipe, target, template, None), target)
    return source.write_rows(number, rows, ignore_progress)
