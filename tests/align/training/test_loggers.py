"""The shipped sweep, under the real `wandb sweep` and `wandb agent`, against a stand-in on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from align.config.recipe_files import FOLDER
from align.training.loggers import MetricsFile, find_run_id


def environment(folder: Path, url: str) -> dict[str, str]:
    """What a user's shell has, with the stand-in for a service and `python` of this environment first on the path."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(FOLDER.parent),
        "HOME": str(folder),
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_ENTITY": "nobody",
        "WANDB_PROJECT": "drafters",
        "WANDB_ERROR_REPORTING": "false",  # nothing leaves this machine
        "OMP_NUM_THREADS": "1",
    }


def wandb(words: list[str], folder: Path, url: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "wandb", *words],
        cwd=folder,
        env=environment(folder, url),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    return output


def test_a_run_goes_on_under_its_own_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    first = find_run_id(tmp_path, fresh=False)
    assert find_run_id(tmp_path, fresh=False) == first != find_run_id(tmp_path, fresh=True)
    monkeypatch.setenv("WANDB_RUN_ID", "agents")
    assert find_run_id(tmp_path, fresh=False) == "agents"
    monkeypatch.delenv("WANDB_RUN_ID")
    assert find_run_id(tmp_path, fresh=False) == "agents"  # the run that the agent began


def test_a_torn_line_is_left_out_and_rows_after_a_step_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,a\n1,2.0\n2,3.0\n3,")
    assert MetricsFile(path).read() == [{"step": "1", "a": "2.0"}, {"step": "2", "a": "3.0"}]
    MetricsFile(path).rewind(1)
    file = MetricsFile(path)
    file.add(2, {"b": 4.0})
    assert file.read() == [{"step": "1", "a": "2.0"}, {"step": "2", "b": "4.0"}]
