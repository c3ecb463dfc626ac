"""A minute of `python -m tests.fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.worker import fuzz


@pytest.mark.slow
def test_hostile_input_is_one_line(tmp_path: Path) -> None:
    count, findings = fuzz(tmp_path, seed=0, minutes=0, cases=350)
    assert count == 350 and not findings, "\n".join(findings)
