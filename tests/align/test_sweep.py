"""W&B's sweep files, their trials, and the command that runs them."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from align.config.parser import load_recipe
from align.sweep import SHIPPED, build_arguments, list_trials, main, read_sweep
from specalign.common.errors import UserError

GOOD = """
method: grid
metric: {name: validation/tau_sampling, goal: maximize}
parameters:
  trainer.learning_rate: {values: [1.0e-4, 2.0e-4, 3.0e-4]}
  objective.terms: {value: "{streak: 1.0}"}
command: ["${env}", "WANDB_MODE=offline", "python", "-m", "align.train", "recipe=debug_block", "${args_no_hyphens}", "--trainer.log_every=2"]
"""
VALUES = "{values: [1.0e-4, 2.0e-4, 3.0e-4]}"


def write_sweep(folder: Path, text: str = GOOD) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_a_grid_and_its_command(tmp_path: Path) -> None:
    sweep = read_sweep(write_sweep(tmp_path))
    assert (sweep.metric, sweep.maximize) == ("validation/tau_sampling", True)
    rates = ("0.0001", "0.0002", "0.0003")
    trials = [{"trainer.learning_rate": r, "objective.terms": "{streak: 1.0}"} for r in rates]
    assert list_trials(sweep, None) == trials and list_trials(sweep, 1) == trials[:1]
    arguments = build_arguments(sweep, trials[0], tmp_path, {})
    assert arguments["trainer.log_every"] == "2" and arguments["recipe"] == "debug_block"


def test_a_random_trial_depends_on_its_number(tmp_path: Path) -> None:
    nested = (
        "seed: {min: 0, max: 9}\n  data.text_share: {min: 0, max: 1.0}\n"
        "  trainer:\n    parameters:\n"
        "      learning_rate: {min: 1e-4, max: 1e-2, distribution: log_uniform_values}"
    )
    text = GOOD.replace(f"trainer.learning_rate: {VALUES}", nested)
    with pytest.raises(UserError, match="a grid needs values for .*; --method random"):
        list_trials(read_sweep(write_sweep(tmp_path, text)), None)
    bayes = text.replace("method: grid", "method: bayes")
    sweep = read_sweep(write_sweep(tmp_path, bayes), "random")
    trials = list_trials(sweep, 300)
    assert list_trials(sweep, None) == trials[:10]
    assert {trial["seed"] for trial in trials} == {*map(str, range(10))}
    rates = sorted(float(trial["trainer.learning_rate"]) for trial in trials)
    assert rates[0] >= 1e-4 and rates[-1] <= 1e-2 and 6e-4 < rates[150] < 1.7e-3
    assert all(0 <= float(trial["data.text_share"]) <= 1 for trial in trials)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("method: grid", "method: grid\nearly_terminate: {}", "'early_terminate' is not supported"),
        ("method: grid", "method: grid\nmetod: 1", "did you mean 'method'"),
        ("goal: maximize", "goal: up", "metric.goal: 'up' is not supported"),
        (VALUES, "{values: []}", "needs values"),
        (VALUES, "{min: 0, max: 1, distribution: log_uniform_values}", "needs values"),
        (VALUES, "{min: 0, max: 1, distribution: q_beta}", "'q_beta' is not supported"),
        (VALUES, "3", "parameters.trainer.learning_rate=3 must be a mapping"),
        ("align.train", "align.tarin", "command must run align.train"),
    ],
)
def test_a_wrong_file_names_its_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(UserError) as error:
        read_sweep(write_sweep(tmp_path, GOOD.replace(old, new)))
    assert says in str(error.value) and str(error.value).startswith("mine.yaml")


def agent_arguments(path: Path, values: dict[str, str]) -> list[str]:
    """The command line that W&B's own code makes of a sweep file."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    typed = {k: v if v[0] == "{" else yaml.safe_load(v) for k, v in values.items()}
    given = {key: {"value": value} for key, value in typed.items()}
    macros = utils.create_sweep_command_args({"args": given}) | {"env": ["/usr/bin/env"]}
    line: list[str] = []
    for word in utils.create_sweep_command(yaml.safe_load(path.read_text())["command"]):
        line += macros[word[2:-1]] if word.startswith("${") else [word]
    return line


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda p: p.stem)
def test_trials_have_the_arguments_of_an_agent(path: Path, tmp_path: Path) -> None:
    sweep = read_sweep(path)
    for values in list_trials(sweep, None)[::5]:
        line = agent_arguments(path, values)
        assert line[:5] == ["/usr/bin/env", "WANDB_MODE=offline", "python", "-m", "align.train"]
        theirs = load_recipe(line[5:])
        arguments = build_arguments(sweep, values, tmp_path, {})
        ours = load_recipe([f"{key}={value}" for key, value in arguments.items()])
        ours.output, ours.data.path = theirs.output, theirs.data.path
        ours.trainer.logger, ours.trainer.resume = theirs.trainer.logger, theirs.trainer.resume
        assert ours == theirs


class FakeTraining:
    """Stands for `subprocess.run`: logs a score that grows with the learning rate, or fails or
    stops at a rate."""

    def __init__(self) -> None:
        self.ran: list[float] = []
        self.codes: dict[float, int] = {}

    def __call__(self, command: list[str], env: dict[str, str], **options: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "align.train"]
        assert env["WANDB_MODE"] == "offline"
        recipe = load_recipe(command[3:])
        rate = recipe.trainer.learning_rate
        self.ran.append(rate)
        name = "validation/tau_sampling"
        table = f"step,{name},{name}_se\n9,{1 + rate},0.1\n10,,\n"
        (Path(recipe.output) / "metrics.csv").write_text(table)
        return SimpleNamespace(returncode=self.codes.get(rate, 0))


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    found = FakeTraining()
    monkeypatch.setattr("align.sweep.subprocess.run", found)
    return found


def test_finished_trials_are_skipped(training: FakeTraining, tmp_path: Path) -> None:
    words = [str(write_sweep(tmp_path)), "--out", str(tmp_path / "out")]

    def run(*more: str) -> int | str | None:
        training.ran = []
        try:
            main([*words, *more])
        except SystemExit as stop:
            return stop.code
        return 0

    training.codes = {2e-4: 2, 3e-4: 130}
    assert run() == 130
    training.codes = {2e-4: 2}
    assert run() == 1 and training.ran == [2e-4, 3e-4]
    table = (tmp_path / "out" / "sweep.md").read_text().splitlines()
    assert table[2:] == [
        "| 0.0003 | {streak: 1.0} | 1.0003 [0.8043, 1.1963] |",
        "| 0.0001 | {streak: 1.0} | 1.0001 [0.8041, 1.1961] |",
        "| 0.0002 | {streak: 1.0} | failed |",
    ]
    training.codes = {}
    assert run() == 0 and training.ran == [2e-4]
    assert run("seed=3") == 0 and len(training.ran) == 3  # other trials, in other folders


def test_what_differs_between_trials_is_refused(training: FakeTraining, tmp_path: Path) -> None:
    for word in ("trainer.learning_rate=1", "output=here"):
        with pytest.raises(SystemExit) as stop:
            main(["block_objective", word, "--out", str(tmp_path / "out")])
        assert stop.value.code == 2 and training.ran == []
