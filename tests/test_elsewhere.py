"""Writing, training and decoding on a device that is not the CPU: no tensor is left behind."""

import pytest

from tests.processes import run_module


@pytest.mark.slow
def test_all_of_it_runs_elsewhere() -> None:
    assert "all of it ran elsewhere" in run_module("tests.elsewhere").stderr
