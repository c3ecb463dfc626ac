"""Trials run once, each in its own folder, with an agent's arguments; an interrupted sweep resumes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from align.config.parser import load_recipe
from align.config.recipe_files import FOLDER
from align.sweeping.run import (
    SweepFile,
    SweepParameter,
    TrialResult,
    build_arguments,
    list_trials,
    read_sweep,
    render_table,
    run_sweep,
)
from specalign.common.errors import UserError

SHIPPED = sorted((FOLDER / "sweeps").glob("*.yaml"))
METRIC = "validation/tau_sampling"
RATES = {"trainer.learning_rate": SweepParameter((1e-4, 2e-4, 3e-4))}


def make_sweep(parameters: dict[str, SweepParameter] = RATES) -> SweepFile:
    return SweepFile(
        "s", "grid", METRIC, True, parameters, {"recipe": "debug_block"}, {"WANDB_MODE": "offline"}
    )


class FakeTraining:
    """Stands for `subprocess.run`: logs a score that grows with the learning rate, or fails or stops at a rate."""

    def __init__(self) -> None:
        self.ran: list[float] = []
        self.codes: dict[float, int] = {}
        self.metric, self.environment = METRIC, dict[str, str]()

    def __call__(self, command: list[str], stdout: Any, env: dict[str, str], **options: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "align.train"]
        recipe = load_recipe(command[3:])
        rate = recipe.trainer.learning_rate
        self.ran.append(rate)
        self.environment = env
        stdout.write(b"one line\nerror: it is broken\n")
        table = f"step,{self.metric},{self.metric}_se\n9,{1 + rate},0.1\n"
        (Path(recipe.output) / "metrics.csv").write_text(table)
        return SimpleNamespace(returncode=self.codes.get(rate, 0))


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    found = FakeTraining()
    monkeypatch.setattr("align.sweeping.run.subprocess.run", found)
    return found


def run_all(folder: Path, sweep: SweepFile | None = None, **fixed: str) -> list[TrialResult]:
    sweep = sweep or make_sweep()
    return run_sweep(sweep, list_trials(sweep, None, 0), folder, fixed)


def agent_arguments(path: Path, values: dict[str, str]) -> list[str]:
    """The command line that W&B's own code makes of a sweep file."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    typed = {
        key: {"value": yaml.safe_load(value) if value[0] != "{" else value}
        for key, value in values.items()
    }
    macros = utils.create_sweep_command_args({"args": typed}) | {"env": ["/usr/bin/env"]}
    line: list[str] = []
    for word in utils.create_sweep_command(yaml.safe_load(path.read_text())["command"]):
        line += macros[word[2:-1]] if word.startswith("${") else [word]
    return line


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_trials_have_the_arguments_of_an_agent(path: Path, tmp_path: Path) -> None:
    sweep = read_sweep(path)
    for values in list_trials(sweep, None, 0):
        line = agent_arguments(path, values)
        assert line[:5] == ["/usr/bin/env", "WANDB_MODE=offline", "python", "-m", "align.train"]
        theirs = load_recipe(line[5:])
        ours = load_recipe(
            [f"{k}={v}" for k, v in build_arguments(sweep, values, tmp_path, {}).items()]
        )
        ours.output, ours.data.path = theirs.output, theirs.data.path
        ours.trainer.logger, ours.trainer.resume = theirs.trainer.logger, theirs.trainer.resume
        assert ours == theirs


def test_finished_trials_are_skipped_and_others_run_again(
    training: FakeTraining, tmp_path: Path
) -> None:
    training.codes = {2e-4: 2, 3e-4: 130}
    with pytest.raises(KeyboardInterrupt):
        run_all(tmp_path)
    training.codes, training.ran = {2e-4: 2}, []
    assert [result.failed for result in run_all(tmp_path)] == ["", "error: it is broken", ""]
    assert training.ran == [2e-4, 3e-4]
    training.codes, training.ran = {}, []
    results = run_all(tmp_path)
    assert training.ran == [2e-4] and [r.score for r in results] == [1 + 1e-4, 1 + 2e-4, 1 + 3e-4]
    assert {result.error for result in results} == {0.1}
    run_all(tmp_path, seed="3")  # other trials, in other folders
    assert len(training.ran) == 4


def test_wrong_arguments_stop_it_before_anything_runs(
    training: FakeTraining, tmp_path: Path
) -> None:
    typo = make_sweep({"trainer.learning_rat": SweepParameter((1,))})
    with pytest.raises(UserError, match=r"^sweep s, trial trainer.learning_rat=1: .*did you mean"):
        run_all(tmp_path, typo)
    with pytest.raises(UserError, match="trainer.learning_rate differs between trials"):
        run_sweep(make_sweep(), [], tmp_path, {"trainer.learning_rate": "1e-3"})
    with pytest.raises(UserError, match="output differs between trials"):
        run_all(tmp_path, output="here")
    assert training.ran == []


def test_the_table_has_intervals_over_seeds_and_the_best_first() -> None:
    sweep = make_sweep({"a": SweepParameter((1,)), "seed": SweepParameter((0, 1, 2))})
    trials = zip(list_trials(sweep, None, 0), (1.0, 1.1, 1.2), strict=True)
    results = [TrialResult(values, score) for values, score in trials]
    single = TrialResult({"a": "3", "seed": "0"}, 5.0, 0.5)
    failed = TrialResult({"a": "4", "seed": "0"}, failed="error: x | y")
    lines = render_table(sweep, [failed, *results, single]).splitlines()
    width = 4.302653 * 0.1 / 3**0.5
    assert lines[0] == f"| a | {METRIC} [95%] | runs |"
    assert lines[2:] == [
        "| 3 | 5.0000 [4.0200, 5.9800] | 1 |",
        f"| 1 | 1.1000 [{1.1 - width:.4f}, {1.1 + width:.4f}] | 3 |",
        "| 4 | failed: error: x \\| y | 0 |",
    ]
