"""Reading W&B's sweep files, and the trials they describe."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.sweeping.run import list_trials, read_sweep
from specalign.common.errors import UserError

GOOD = """
method: grid
metric: {name: validation/tau_sampling, goal: maximize}
parameters:
  seed: {values: [0, 1]}
  objective.terms: {value: "{streak: 1.0}"}
command: ["${env}", "WANDB_MODE=offline", "python", "-m", "align.train", "recipe=debug_block", "${args_no_hyphens}", "--trainer.log_every=2"]
"""


def write_sweep(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_a_grid_and_its_command(tmp_path: Path) -> None:
    sweep = read_sweep(write_sweep(tmp_path, GOOD))
    assert (sweep.name, sweep.metric, sweep.maximize) == ("mine", "validation/tau_sampling", True)
    assert sweep.arguments == {"recipe": "debug_block", "trainer.log_every": "2"}
    assert sweep.environment == {"WANDB_MODE": "offline"}
    trials = [{"seed": seed, "objective.terms": "{streak: 1.0}"} for seed in ("0", "1")]
    assert list_trials(sweep, None, 0) == trials and list_trials(sweep, 1, 0) == trials[:1]


def test_a_random_trial_depends_on_its_seed_and_number(tmp_path: Path) -> None:
    ranges = "seed: {min: 0, max: 9}\n  data.text_share: {min: 0, max: 1.0}\n  trainer.learning_rate: {min: 1e-4, max: 1e-2, distribution: log_uniform_values}"
    text = GOOD.replace("seed: {values: [0, 1]}", ranges)
    with pytest.raises(UserError, match="a grid needs values for seed; --method random"):
        list_trials(read_sweep(write_sweep(tmp_path, text)), None, 0)
    sweep = read_sweep(
        write_sweep(tmp_path, text.replace("method: grid", "method: bayes")), "random"
    )
    trials = list_trials(sweep, 300, 7)
    assert list_trials(sweep, None, 7) == trials[:10] and list_trials(sweep, 300, 8) != trials
    assert {trial["seed"] for trial in trials} == {*map(str, range(10))}
    rates = sorted(float(trial["trainer.learning_rate"]) for trial in trials)
    assert rates[0] >= 1e-4 and rates[-1] <= 1e-2 and 6e-4 < rates[150] < 1.7e-3
    assert all(0 <= float(trial["data.text_share"]) <= 1 for trial in trials)


def test_nested_parameters_and_multiples(tmp_path: Path) -> None:
    nested = (
        "trainer:\n    parameters:\n      batch_size: {distribution: q_uniform, min: 2, max: 8, q: 2}\n"
        "      learning_rate: {distribution: q_log_uniform_values, min: 1e-4, max: 1e-2, q: 1e-4}"
    )
    text = GOOD.replace("seed: {values: [0, 1]}", nested)
    trials = list_trials(read_sweep(write_sweep(tmp_path, text), "random"), 60, 0)
    assert {trial["trainer.batch_size"] for trial in trials} == {"2", "4", "6", "8"}
    assert all(len(trial["trainer.learning_rate"]) <= 6 for trial in trials)


VALUES = "{values: [0, 1]}"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("method: grid", "method: bayes", "method='bayes' is not supported by the local runner"),
        ("method: grid", "method: grid\nearly_terminate: {}", "'early_terminate' is not supported"),
        ("method: grid", "method: grid\nmetod: 1", "did you mean 'method'"),
        ("goal: maximize", "goal: up", "metric needs a name and a goal"),
        (VALUES, "{values: []}", "needs values"),
        (VALUES, "{vaules: [0]}", "did you mean 'values'"),
        (VALUES, "{min: 0, max: .inf}", "needs values"),
        (VALUES, "{min: 0, max: 1, distribution: log_uniform_values}", "needs values"),
        (VALUES, "{min: 0, max: 1, distribution: q_beta}", "'q_beta' is not supported"),
        (
            VALUES,
            "{min: -9, max: -7, distribution: log_uniform}",
            "did you mean 'log_uniform_values'",
        ),
        (VALUES, "3", "parameters.seed: parameter=3 must be a mapping"),
        ("align.train", "align.tarin", "command must run align.train"),
    ],
)
def test_a_wrong_file_names_its_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(UserError) as error:
        read_sweep(write_sweep(tmp_path, GOOD.replace(old, new)))
    assert says in str(error.value) and str(error.value).startswith("mine.yaml")
