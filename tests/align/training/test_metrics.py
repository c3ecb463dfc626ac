"""Sums of a validation, the table of metrics, and the id of a W&B run."""

from pathlib import Path

import pytest
import torch

from align.training.loggers import MetricsFile, find_run_id
from align.training.metrics import ValidationSums


def test_the_sums_of_two_processes_are_those_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    whole, parts = ValidationSums(3), [ValidationSums(3), ValidationSums(3)]
    for part in parts:
        kept = torch.rand(4, 3, generator=generator).sort(-1, descending=True).values
        beta = torch.rand(4, 3, generator=generator)
        valid = torch.rand(4, 3, generator=generator) > 0.3
        nats, tokens = torch.rand(4, generator=generator), torch.tensor([1.0, 2.0, 3.0, 0.0])
        for sums in (part, whole):
            sums.add_loss(kept.sum(), torch.tensor(4))
            sums.add_accepted("sampling", kept)
            sums.add_positions("sampling", beta, valid)
            sums.add_bound(nats, tokens)
    numbers = whole.numbers(whole.vector())
    assert whole.numbers(parts[0].vector() + parts[1].vector()) == pytest.approx(numbers)
    assert numbers["anchors_sampling"] == 8 and "tau_greedy" not in numbers
    reached = [numbers[f"kept_sampling_{k}"] for k in (1, 2, 3)]
    assert sum(reached) == pytest.approx(numbers["tau_sampling"] - 1)


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
    file.log_metrics({"b": 4.0}, 2)
    assert file.read() == [{"step": "1", "a": "2.0"}, {"step": "2", "b": "4.0"}]
