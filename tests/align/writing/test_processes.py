"""Several processes write what one writes, also after a kill; one that dies ends the run with a message."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from align.config.hardware import check_devices
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.synthesis import synthesize
from align.writing.in_process import InProcess
from align.writing.processes import Processes, open_writer
from align.writing.rows import Plan, ignore_progress
from align.writing.template import chat_template
from specalign.common.errors import UserError
from specalign.lm.model import Target

WORDS = [
    "recipe=debug_block", "data.samples=20", "data.batch_size=4", "data.max_answer_tokens=6", "target.device=cpu",
    "trainer.batch_size=6",
]  # fmt: skip


def write(recipe: Recipe, folder: Path) -> dict[str, bytes]:
    with open_writer(recipe) as (target, source):
        synthesize(recipe, target, folder, quiet=True, source=source)
    suffixes = (".json", ".safetensors")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in suffixes}


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same(tmp_path: Path) -> None:
    """With written prompts; and with given ones that run out, after a stop with other processes."""
    one = write(load_recipe(WORDS), tmp_path / "one")
    assert write(load_recipe([*WORDS, "launch.devices=3"]), tmp_path / "three") == one
    (tmp_path / "p.txt").write_text(
        "".join(f"Say {i} {'abcdefghijklmn'[i % 7 :]}\n" for i in range(11))
    )
    words = [f"data.prompts={tmp_path}/p.txt", *(word for word in WORDS if "samples" not in word)]
    for samples, devices in ((6, 2), (20, 1)):
        more = [*words, f"data.samples={samples}"]
        resumed = write(load_recipe([*more, f"launch.devices={devices}"]), tmp_path / "resumed")
        whole = write(load_recipe(more), tmp_path / "whole")
        assert resumed == whole
    assert data.read_manifest(tmp_path / "whole")["ended"]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_writing(target: Target) -> None:
    recipe = load_recipe([*WORDS, "launch.devices=2"])
    source = Processes(recipe).open_source(Plan(recipe, target, chat_template(target), None))
    assert source.write(0, 8) and sorted(source._batches) == [1]
    os.kill(next(iter(source._pool._processes)), signal.SIGKILL)
    with pytest.raises(UserError, match="launch.devices=2: a writing process died"):
        for number in range(1, 50):
            source.write(number, 8)
    processes = list((source._pool._processes or {}).values())
    source.close()
    assert not any(process.is_alive() for process in processes)


@pytest.mark.slow
def test_a_target_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="target"):
        Processes(load_recipe([*WORDS, f"target.name={tmp_path}/x", "launch.devices=2"]))


def test_more_processes_than_the_machine_can_run_are_refused() -> None:
    with pytest.raises(UserError, match="launch.devices=10000: at most"):
        check_devices(
            load_recipe([*WORDS[:-1], "launch.devices=10000", "trainer.batch_size=10000"])
        )


def test_one_process_or_a_server() -> None:
    for words in ([], ["data.writer=openai:http://127.0.0.1:9"]):
        with open_writer(load_recipe(["recipe=debug_block", *words])) as (target, source):
            assert isinstance(target, Target) and source is None


def test_a_batch_depends_on_its_number_alone(target: Target) -> None:
    recipe = load_recipe(["recipe=debug_block", "data.batch_size=4", "data.max_answer_tokens=5"])
    source = InProcess(Plan(recipe, target, chat_template(target), None), target)
    first = source.write(0, 8, ignore_progress)
    second = source.write(1, 4, ignore_progress)
    assert source.write(0, 8, ignore_progress) == first and first != second
