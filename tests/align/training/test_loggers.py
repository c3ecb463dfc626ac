"""A run's W&B id, and its table of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.training.loggers import MetricsFile, find_run_id


def test_a_run_goes_on_under_its_own_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    first = find_run_id(tmp_path, fresh=False)
    assert find_run_id(tmp_path, fresh=False) == first != find_run_id(tmp_path, fresh=True)
    monkeypatch.setenv("WANDB_RUN_ID", "agents")
    assert find_run_id(tmp_path, fresh=False) == "agents"
    monkeypatch.delenv("WANDB_RUN_ID")
    assert find_run_id(tmp_path, fresh=False) == "agents"  # the run that the agent began


def test_a_torn_line_is_left_out_and_rows_after_a_step_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,a\n1,2.0\n2,3.0\n3,")
    assert MetricsFile(path).read() == [{"step": "1", "a": "2.0"}, {"step": "2", "a": "3.0"}]
    MetricsFile(path).rewind(1)
    file = MetricsFile(path)
    file.add(2, {"b": 4.0})
    assert file.read() == [{"step": "1", "a": "2.0"}, {"step": "2", "b": "4.0"}]
