"""A process that dies, stops, hangs or fails ends the run with one line; what it saved is there, and the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from align.config.parser import load_recipe
from align.training.parallel import watch
from align.training.parallel.watch import PATIENCE, SILENT, SLOWEST, Beats, Judge, place
from tests.forks import ONE_THREAD, train_in_forks

ROOT = Path(__file__).resolve().parents[4]


def sign(time: float, beats: int = 1, **changes: Any) -> dict[str, Any]:
    usual = {"patient": False, "longest": 0.1, "step": 3, "over": False, "failed": None, "place": None}
    return {"time": time, "beats": beats, **usual, **changes}


def judge(*signs: dict[str, Any], now: float = 0.0, waits: bool = False) -> Judge:
    made = Judge(len(signs), 30.0, waits)
    for rank, found in enumerate(signs):
        made.hear(rank, found, now)
    return made


def test_signs_of_life_without_progress_are_hanging() -> None:
    made = judge(sign(0), sign(0))
    for now in (10.0, 20.0, 30.0):
        made.hear(0, sign(now, place=("torch/distributed/x.py:1 in all_reduce", False)), now)
        made.hear(1, sign(now, place=("mine.py:7 in sleeps", True)), now)
        assert made.verdict(SILENT, now) is None
    line = made.verdict(SILENT, 31.0)
    assert line is not None and line.startswith(
        "rank 1 of 2 has not gone on for 31 s after step 3 (it is at mine.py:7"
    )


def test_one_that_goes_on_keeps_the_run_alive() -> None:
    made = judge(sign(0), sign(0))
    for now in (20, 40, 60):
        made.hear(0, sign(now, beats=now), now)
        made.hear(1, sign(now), now)
        assert made.verdict(SILENT, now) is None


@pytest.mark.parametrize(
    ("change", "until"),
    [({"patient": True}, 30.0 * PATIENCE), ({"longest": 40.0}, 40.0 * SLOWEST), ({"over": True}, 1e6)],
)
def test_what_may_take_its_time(change: dict[str, Any], until: float) -> None:
    made = judge(sign(0), sign(0))
    for now, hangs in ((until - 1, False), (until + 1, "over" not in change)):
        made.hear(0, sign(now, **change), now)
        made.hear(1, sign(now, **change), now)
        assert (made.verdict(SILENT, now) is not None) is hangs


def test_waiting_for_text_is_no_hanging() -> None:
    made = judge(sign(0), sign(0), waits=True)
    for rank in (0, 1):
        made.hear(rank, sign(1e6), 1e6)
    assert made.verdict(SILENT, 1e6) is None


def test_no_sign_of_life_is_death_unless_it_was_over() -> None:
    made = judge(sign(0), sign(0))
    made.hear(0, sign(30.0, beats=2, step=5), 30.0)
    assert made.verdict(40.0, 30.0) is None
    assert made.verdict(SILENT, 30.0) == "rank 1 of 2 has died or does not answer, after step 5"
    made = judge(sign(0), sign(0, over=True))
    made.hear(0, sign(30.0, beats=2), 30.0)
    assert made.verdict(SILENT, 30.0) is None


def test_a_failure_is_said_as_it_is() -> None:
    assert (
        judge(sign(0), sign(0, failed="OSError: full")).verdict(SILENT, 0.0)
        == "rank 1 of 2 ended: OSError: full"
    )


def test_all_that_wait_for_each_other() -> None:
    made = judge(sign(0), sign(0))
    made.hear(0, sign(31.0), 31.0)
    assert made.verdict(1e6, 31.0) is None  # of the other one nothing was heard
    made.hear(1, sign(31.0), 31.0)
    line = made.verdict(1e6, 31.0)
    assert line is not None and line.startswith("none of the 2 processes has gone on for 31 s")


def test_beats_measure_the_longest_way_outside_of_patience() -> None:
    beats = Beats()
    beats.beat()
    beats.patient -= 1  # the first step is done
    with beats.patiently():
        time.sleep(0.01)
        beats.beat()
    assert (beats.count, beats.patient, beats.longest) == (2, 0, 0.0)
    time.sleep(0.001)
    beats.beat()
    assert beats.longest > 0


def test_a_thread_is_busy_where_it_is_not_in_a_collective() -> None:
    found = place(threading.get_ident())
    assert found is not None and found[0].endswith("in place") and found[1]
    assert place(-1) is None


@pytest.mark.parametrize("rank", [1, 2])
def test_a_main_process_that_stands_still_is_not_waited_for(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store takes what is said and answers nothing."""
    said, still = list[str | None](), threading.Event()
    own = watch.Watch(load_recipe(["recipe=debug_block"]))

    def ends(line: str | None) -> None:
        said.append(line)
        own._stopped.set()

    monkeypatch.setattr(watch, "TICK", 0.01)
    monkeypatch.setattr(watch, "SILENT", 0.1)
    monkeypatch.setattr(watch, "end_run", ends)
    own.rank, own.world = rank, 3
    own._store = SimpleNamespace(set=lambda *_: None, check=lambda _: still.wait(30))  # type: ignore[assignment]
    asking = threading.Thread(target=own._run, daemon=True)
    asking.start()
    own._guard()
    assert said == ["rank 0 of 3 has died or does not answer, after step 0" if rank == 1 else None]
    still.set()
    asking.join()


# ---- whole runs ----


def words(output: Path, data: Path, *more: str, timeout: int = 4) -> list[str]:
    own = [f"output={output}", f"data.path={data}", "launch.accelerator=cpu", "launch.devices=2"]
    return ["recipe=debug_block", *own, "trainer.checkpoint_every=2", f"launch.timeout={timeout}", *more]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "plant", "says"),
    [
        ("ddp", "1 dies", "rank 1 of 2 has died or does not answer, after step 3"),
        ("ddp", "1 stops", "rank 1 of 2 has died or does not answer, after step 3"),
        ("fsdp", "1 sleeps", "rank 1 of 2 has not gone on for"),
        ("ddp", "1 fails", "rank 1 of 2 ended: RuntimeError: planted"),
    ],
)
def test_the_run_ends_with_one_line_and_goes_on(
    tmp_path: Path, debug_data: Path, strategy: str, plant: str, says: str
) -> None:
    output = tmp_path / "two"
    timeout = 10 if plant == "1 stops" else 4  # longer than it takes for silence to be told from hanging
    mine = words(output, debug_data, f"launch.strategy={strategy}", "trainer.max_steps=6", timeout=timeout)
    done = train_in_forks(mine, tmp_path, 2, plant)
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert done.returncode == 1 and len(errors) == 1 and errors[0].startswith(f"error: {says}"), done.stderr
    assert "Traceback" not in done.stderr and not (output / "drafter").exists()
    if plant != "1 sleeps":
        return
    again = train_in_forks(mine, tmp_path, 2)
    assert again.returncode == 0 and "going on from" in again.stderr and "step-2.ckpt" in again.stderr
    assert (output / "drafter" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_kill_one_of_the_processes_of_a_command_as_typed(
    tmp_path: Path, debug_data: Path, victim: int
) -> None:
    output = tmp_path / "two"
    command = [sys.executable, "-m", "align.train", *words(output, debug_data, "trainer.max_steps=100000")]
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "stderr").open("w") as err:
        run = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=err)
    seal = output / "checkpoints" / "step-2.json"
    while not seal.exists() and run.poll() is None:
        time.sleep(0.1)
    pids = [run.pid, *map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())]
    child = next(p for p in pids[1:] if b"LOCAL_RANK=1" in Path(f"/proc/{p}/environ").read_bytes())
    os.kill((run.pid, child)[victim], signal.SIGKILL)
    assert run.wait(600) == (1 if victim else -signal.SIGKILL)
    while Path(f"/proc/{child}").exists():  # it ends as well
        time.sleep(0.1)
    errors = [line for line in (tmp_path / "stderr").read_text().splitlines() if "error" in line.lower()]
    says = ("rank 0 ", "rank 1 of 2 ended with SIGKILL")[victim]
    assert len(errors) == 1 and errors[0].startswith(f"error: {says}"), errors
