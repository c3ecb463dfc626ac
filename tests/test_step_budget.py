"""A training step's launches, host syncs and blocking uploads on a GPU may only fall. After an
improvement: python -m tools.step_budget | tail -1 > tests/golden/step_budget.json"""

import json

import pytest

from tests.processes import ROOT, run_module

GOLDEN = ROOT / "tests" / "golden" / "step_budget.json"


@pytest.mark.slow
def test_a_step_costs_no_more_than_before() -> None:
    found = json.loads(run_module("tools.step_budget").stdout.splitlines()[-1])
    for name, most in json.loads(GOLDEN.read_text()).items():
        for kind, count in most.items():
            assert found[name][kind] <= count, (name, kind)
