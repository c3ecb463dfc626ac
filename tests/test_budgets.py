"""Budgets of a GPU, counted without one: launches, host syncs and blocking uploads may only fall. After an improvement:

python -m tools.round_budget --json > tests/golden/round_budget.json
python -m tools.step_budget | tail -1 > tests/golden/step_budget.json
"""

import json
from typing import Any

import pytest

from tests.processes import ROOT, run_module


def read_golden(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())


@pytest.mark.slow
def test_a_round_costs_no_more_than_before() -> None:
    found = json.loads(run_module("tools.round_budget", "--json").stdout)
    for name, row in read_golden("round_budget").items():
        for engine, most in row.items():
            pairs = zip(found[name][engine], most, strict=True)
            assert all(count <= limit for count, limit in pairs), (name, engine, found[name])


def test_the_captured_round_waits_for_nothing() -> None:
    """One read of the results, no upload, and as many launches for a batch as for one request."""
    table = read_golden("round_budget")
    for name in [name for name, row in table.items() if "captured" in row]:
        launches, syncs, uploads = table[name]["captured"]
        alone = table[f"{name.rsplit(' ', 1)[0]} 1"]["captured"][0]
        assert (syncs, uploads) == (1, 0), name
        assert abs(launches - alone) <= 0.02 * alone, name


@pytest.mark.slow
def test_a_step_costs_no_more_than_before() -> None:
    found = json.loads(run_module("tools.step_budget").stdout.splitlines()[-1])
    for name, most in read_golden("step_budget").items():
        for kind, count in most.items():
            assert found[name][kind] <= count, (name, kind)


@pytest.mark.slow
def test_all_of_it_runs_elsewhere() -> None:
    """Writing, training and decoding on a device that is not the CPU: no tensor is left behind."""
    assert "all of it ran elsewhere" in run_module("tests.elsewhere").stderr
