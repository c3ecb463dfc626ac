"""Each command of docs/scale.md that starts training, at tiny size on CPU processes, as it is written there."""

from __future__ import annotations

import csv
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import ONE_THREAD, train_in_forks

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
LINES = [
    line.partition("  #")[0].strip()
    for line in PAGE.partition("## Start a run")[2].partition("\n## ")[0].splitlines()
    if line.startswith("    ") and "align.train" in line
]
TINY = {
    "recipe": "debug_block",
    "trainer.batch_size": "2",
    "launch.devices": "2",
    "launch.num_nodes": "1",
}
SRUN = {
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "localhost",
}


def tiny(line: str, output: Path, data: Path) -> tuple[list[str], list[str]]:
    """The launcher with its options, and the words of `align.train`, for two processes of this machine."""
    before, _, after = line.partition("align.train ")
    launcher = shlex.split(before.replace("8", "2"))
    words = {
        key: TINY.get(key, value)
        for key, _, value in (w.partition("=") for w in shlex.split(after))
    }
    words |= {"output": str(output), "launch.accelerator": "cpu", "data.path": str(data)}
    words |= {"trainer.max_steps": "2", "trainer.warmup_steps": "1"}
    return launcher, [f"{key}={value}" for key, value in words.items()]


def test_the_page_has_a_line_for_each_place() -> None:
    assert [re.sub(r"python -m ", "", line).split()[0] for line in LINES] == [
        "align.train", "align.train", "align.train", "torchrun", "deepspeed", "srun",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_line_of_the_page(
    tmp_path: Path, debug_data: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "two"
    launcher, words = tiny(LINES[number], output, debug_data)
    if launcher[0] == "python" or launcher[0] == "srun":
        # processes are forked from one that has imported torch; srun is not here, its tasks know who they are by its variables
        processes = 1 if "launch.devices=2" not in words else 2
        done = train_in_forks(
            words, tmp_path, processes, slurm=SRUN if launcher[0] == "srun" else None
        )
    else:
        env = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        name = "--master-port" if launcher[0] == "torchrun" else "--master_port"
        command = [launcher[0], name, port, *launcher[1:], "align.train", *words]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
    assert done.returncode == 0, done.stderr
    assert (output / "drafter" / "model.safetensors").is_file()
    with (output / "metrics.csv").open(newline="") as file:
        assert len([row for row in csv.DictReader(file) if row.get("train/loss")]) == 2
