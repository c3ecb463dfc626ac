"""The table: intervals over seeds, the best first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from align.sweeping.config import Parameter, Sweep
from align.sweeping.run import Result
from align.sweeping.table import rows, table
from align.sweeping.trials import trials

SWEEP = Sweep(
    "s", "grid", "validation/tau", True, (Parameter("a", (1, 2)), Parameter("seed", (0, 1, 2))), (), ()
)


def test_seeds_make_an_interval() -> None:
    found = trials(SWEEP, None, 0)
    scores = [1.0, 1.1, 1.2, 2.0, 2.0, 2.3]
    made = rows(SWEEP, found, [Result(i, 9, s) for i, s in enumerate(scores)])
    assert [row.values for row in made] == [(("a", 2),), (("a", 1),)]
    assert made[1].score == pytest.approx(1.1) and made[1].runs == 3
    assert made[1].high - made[1].score == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-4)


def test_the_same_run_twice_is_one_run() -> None:
    """Drawn again, it says the same again: no interval comes of that."""
    sweep = Sweep("s", "random", "validation/tau", True, (Parameter("seed", (0, 0, 1)),), (), ())
    found = trials(replace(sweep, method="grid"), None, 0)
    made = rows(sweep, found, [Result(0, 9, 1.0), Result(1, 9, 1.0), Result(2, 9, 2.0)])
    assert [(row.runs, row.score) for row in made] == [(2, 1.5)]


def test_one_run_has_its_own_standard_error_or_none() -> None:
    sweep = Sweep("s", "grid", "loss", False, (Parameter("a", (1, 2, 3)),), (), ())
    found = trials(sweep, None, 0)
    made = rows(
        sweep, found, [Result(0, 9, 5.0, 0.5), Result(1, 9, 3.0), Result(2, 9, failed="error: x | y")]
    )
    assert [row.values[0][1] for row in made] == [2, 1, 3]
    page = table(
        sweep, found, [Result(0, 9, 5.0, 0.5), Result(1, 9, 3.0), Result(2, 9, failed="error: x | y")]
    )
    assert "| 1 | 5.0000 [4.0200, 5.9800] | 9 | 1 |" in page and "| 2 | 3.0000 | 9 | 1 |" in page
    assert "failed: error: x \\| y" in page


def test_longer_runs_are_not_better_by_themselves() -> None:
    sweep = Sweep("s", "grid", "tau", True, (Parameter("trainer/max_steps", (3, 12)),), (), ())
    found = trials(sweep, None, 0)
    results = [Result(0, 3, 9.0, 0.1), Result(1, 12, 2.0, 0.1)]
    assert [row.steps for row in rows(sweep, found, results)] == [3, 12]
    assert table(sweep, found, results).startswith("| trainer.max_steps | tau [95%] | steps | runs |")
