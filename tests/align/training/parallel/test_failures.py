"""A process that dies or stops responding ends the run with one error; the same command resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forks import ONE_THREAD, train_in_forks

ROOT = Path(__file__).resolve().parents[4]


def arguments(output: Path, data: Path, *more: str) -> list[str]:
    own = [f"output={output}", f"data.path={data}", "launch.accelerator=cpu", "launch.devices=2"]
    return ["recipe=debug_block", *own, "trainer.checkpoint_every=2", *more]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "plant"), [("ddp", "1 dies"), ("fsdp", "1 sleeps")])
def test_the_others_do_not_wait_for_ever(
    tmp_path: Path, debug_data: Path, strategy: str, plant: str
) -> None:
    output = tmp_path / "two"
    more = (f"launch.strategy={strategy}", "trainer.max_steps=6", "launch.timeout=10")
    mine = arguments(output, debug_data, *more)
    done = train_in_forks(mine, tmp_path, 2, plant)
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert done.returncode == 1 and len(errors) == 1, done.stderr
    assert errors[0].startswith("error: another process has failed or stopped responding")
    assert "Traceback" not in done.stderr and not (output / "drafter").exists()
    if plant == "1 sleeps":
        again = train_in_forks(mine, tmp_path, 2)
        assert again.returncode == 0 and "step-2.ckpt" in again.stderr
        assert (output / "drafter" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_killed_process_is_named(tmp_path: Path, debug_data: Path) -> None:
    output = tmp_path / "two"
    more = ("trainer.max_steps=100000",)
    command = [sys.executable, "-m", "align.train", *arguments(output, debug_data, *more)]
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "stderr").open("w") as err:
        run = subprocess.Popen(
            command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=err
        )
    seal = output / "checkpoints" / "step-2.json"
    while not seal.exists() and run.poll() is None:
        time.sleep(0.1)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    ranks = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in map(int, children)}
    victim = next(pid for pid, variables in ranks.items() if b"LOCAL_RANK=1\0" in variables)
    os.kill(victim, signal.SIGKILL)
    assert run.wait(600) == 1
    text = (tmp_path / "stderr").read_text()
    assert "error: rank 1 of 2 ended with SIGKILL; rerun the command to resume" in text
    assert "Traceback" not in text
