"""Several processes write what one writes, whatever their number, also after a kill; one that dies ends the run with a line."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.synthesis import synthesize
from align.target.model import Target
from align.writing.generation import Row
from align.writing.opening import opened
from align.writing.outline import Outline
from align.writing.processes import Processes
from align.writing.rows import Plan
from align.writing.template import chat_template

WORDS = [
    "recipe=debug_block",
    "data.samples=20",
    "data.batch_size=4",
    "data.max_answer_tokens=6",
    "target.device=cpu",
    "trainer.batch_size=6",
]


def write(recipe: Recipe, folder: Path) -> dict[str, bytes]:
    """The files of a folder after the writing."""
    with opened(recipe) as (target, source):
        synthesize(recipe, target, folder, quiet=True, source=source)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".safetensors")
    }


@pytest.mark.slow
def test_as_many_processes_as_one_likes(tmp_path: Path) -> None:
    """With written prompts, and with given ones that end before as many samples as are asked for, with others after a stop."""
    one = write(load_recipe(WORDS), tmp_path / "one")
    assert write(load_recipe([*WORDS, "launch.devices=3"]), tmp_path / "three") == one
    texts = "".join(f"Say {i} {'abcdefghijklmn'[i % 7 :]}\n" for i in range(11))
    (tmp_path / "p.txt").write_text(texts)
    words = [f"data.prompts={tmp_path}/p.txt", *(word for word in WORDS if "samples" not in word)]
    for samples, devices in ((6, 2), (20, 1)):
        more = [*words, f"data.samples={samples}"]
        resumed = write(load_recipe([*more, f"launch.devices={devices}"]), tmp_path / "resumed")
        whole = write(load_recipe(more), tmp_path / "whole")
        assert resumed == whole
    assert data.read_manifest(tmp_path / "whole")["ended"]


def told(pipe: Connection, recipe: Recipe, device: str, count: int) -> None:
    """A process without a model: its rows hold the batch's number; batch 3 kills it, batch 5 can't be written."""
    pipe.send((True, Outline("debug", None, None, (2,), 10, 100)))  # type: ignore[arg-type]
    while True:
        batch, _ = pipe.recv()
        if batch == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if batch == 5:
            pipe.send((False, "no room"))
            continue
        pipe.send((True, [Row(batch, 0.0, [], False, tokens=[batch])]))


@pytest.fixture(scope="module")
def plan(target: Target) -> Plan:
    recipe = load_recipe(["recipe=debug_block", "launch.devices=2", "data.batch_size=1", "target.device=cpu"])
    return Plan(recipe, target, chat_template(target), None)


@pytest.mark.slow
def test_batches_come_in_order_and_no_more_than_are_needed(plan: Plan) -> None:
    source = Processes(plan.recipe, told).source(plan)
    heard: list[tuple[int, int]] = []
    rows = [source.write(n, 3 - n, lambda tokens, done=0: heard.append((tokens, done))) for n in range(3)]
    assert [row[0].tokens for row in rows if row] == [[0], [1], [2]]
    assert heard == [(1, 1)] * 3 and source._next == 3
    source.close()
    assert not any(worker.process.is_alive() for worker in source._workers)


@pytest.mark.slow
def test_a_process_that_dies_or_refuses_ends_the_writing(plan: Plan) -> None:
    for batch, says in (
        (3, r"launch.devices=2: one of the processes that write ended by signal 9"),
        (5, "no room"),
    ):
        source = Processes(plan.recipe, told).source(plan)
        with pytest.raises(UserError, match=says):
            source.write(batch, 1)
        source.close()


def test_more_processes_than_a_processor_holds_are_refused() -> None:
    with pytest.raises(UserError, match="launch.devices=10000: at most"):
        Processes(load_recipe([*WORDS[:-1], "launch.devices=10000", "trainer.batch_size=10000"]))
