"""Two points of `python -m tests.kills`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it waits for processes as Linux has it")
def test_a_killed_command_ends_as_an_undisturbed_one() -> None:
    """Writing, killed at a call that changes a file; training, killed between a checkpoint and the removal of the one before."""
    command = [sys.executable, "-m", "tests.kills", "--seed", "0", "--point", "kill-0", "kill-125"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "2 kills, 0 full disks, 0 findings" in done.stdout, (
        done.stdout + done.stderr
    )
