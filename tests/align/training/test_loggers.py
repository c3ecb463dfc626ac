"""The shipped sweep, under the real `wandb sweep` and `wandb agent`, against a stand-in on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from align.config.recipe_files import FOLDER
from align.training.loggers import MetricsFile, find_run_id
from specalign.common.errors import UserError


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


@pytest.mark.parametrize(
    ("raw", "steps"),
    [
        (b"step,a\n1,2.0\n\xff\xfe,\x00\n", ["1"]),
        ("step,a\n²,1.0\n3,1.0\n".encode(), ["3"]),
        (b"step,a\n" + b"9" * 5000 + b",1.0\n4,1.0\n", ["4"]),
        (b"", []),
    ],
)
def test_damaged_metrics_are_left_out_line_by_line(
    tmp_path: Path, raw: bytes, steps: list[str]
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(raw)
    assert [row["step"] for row in MetricsFile(path).read()] == steps
    MetricsFile(path).rewind(9)


def test_a_broken_id_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    for raw in (b"\xff\xfe", b"a\x1b[31m", b"../x", b"a\nb"):
        (tmp_path / "wandb-run-id").write_bytes(raw)
        with pytest.raises(UserError, match="wandb-run-id: not the id"):
            find_run_id(tmp_path, False)
    (tmp_path / "wandb-run-id").write_text("abc-1\n")
    assert find_run_id(tmp_path, False) == "abc-1"
