"""A training step's launches, host syncs and blocking uploads on a GPU may only fall. After an
improvement: python -m tools.step_budget | tail -1 > tests/golden/step_budget.json"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "step_budget.json"


@pytest.mark.slow
def test_a_step_costs_no_more_than_before() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tools.step_budget"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, most in json.loads(GOLDEN.read_text()).items():
        for kind, count in most.items():
            assert found[name][kind] <= count, (name, kind)
