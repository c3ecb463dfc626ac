"""Writing, training and decoding on a device that is not the CPU: no tensor is left behind."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MIXED = """
import torch
from tests.elsewhere import DEVICE, Elsewhere
with Elsewhere():
    there = torch.ones(2, device=DEVICE)
    for mistake in (lambda: there + torch.ones(2), lambda: there.uniform_(generator=torch.Generator())):
        try:
            mistake()
        except RuntimeError as error:
            print("refused:", error)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )


def test_all_of_it_runs_elsewhere() -> None:
    done = run("-m", "tests.elsewhere")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all of it ran elsewhere" in done.stderr


def test_mixed_devices_and_generators_are_refused_there() -> None:
    done = run("-c", MIXED)
    assert done.stdout.count("refused:") == 2, done.stdout + done.stderr[-2000:]
