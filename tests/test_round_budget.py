"""A decoding round's launches, host syncs and blocking uploads on a GPU may only fall. After an
improvement: python -m tools.round_budget --json > tests/golden/round_budget.json"""

import json

import pytest

from tests.processes import ROOT, run_module

GOLDEN = ROOT / "tests" / "golden" / "round_budget.json"


@pytest.mark.slow
def test_a_round_costs_no_more_than_before() -> None:
    found = json.loads(run_module("tools.round_budget", "--json").stdout)
    for name, row in json.loads(GOLDEN.read_text()).items():
        for engine, most in row.items():
            pairs = zip(found[name][engine], most, strict=True)
            assert all(count <= limit for count, limit in pairs), (name, engine, found[name])


def test_the_captured_round_waits_for_nothing() -> None:
    """One read of the results, no upload, and as many launches for a batch as for one request."""
    table = json.loads(GOLDEN.read_text())
    for name in [name for name, row in table.items() if "captured" in row]:
        launches, syncs, uploads = table[name]["captured"]
        alone = table[f"{name.rsplit(' ', 1)[0]} 1"]["captured"][0]
        assert (syncs, uploads) == (1, 0), name
        assert abs(launches - alone) <= 0.02 * alone, name
