"""W&B's sweep files, read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import FOLDER
from align.sweeping.config import read_sweep

GOOD = """
method: grid
metric: {name: validation/tau_sampling, goal: maximize}
parameters:
  seed: {values: [0, 1]}
command: ["${env}", "python", "-m", "align.train", "recipe=debug_block", "${args_no_hyphens}", "trainer.log_every=2"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted((FOLDER / "sweeps").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_ones_are_read(path: Path) -> None:
    sweep = read_sweep(path)
    assert (
        sweep.maximise and sweep.metric == "validation/tau_sampling" and sweep.words[0].startswith("recipe=")
    )


def test_words_stand_on_both_sides_of_the_parameters(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path, GOOD))
    assert (sweep.name, sweep.words, sweep.later) == (
        "mine",
        ("recipe=debug_block",),
        ("trainer.log_every=2",),
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("method: grid", "method: bayes", "--method random runs here"),
        ("method: grid", "method: gird", "did you mean 'grid'"),
        ("method: grid", "method: grid\nearly_terminate: {type: hyperband}", "--halving"),
        ("method: grid", "method: grid\nmetod: 1", "did you mean 'method'"),
        ("goal: maximize", "goal: up", "metric.goal='up'"),
        ("name: validation/tau_sampling, ", "", "metric must have a name"),
        ("{values: [0, 1]}", "{values: []}", "parameters.seed.values"),
        ("{values: [0, 1]}", "{vaules: [0]}", "did you mean 'values'"),
        ("{values: [0, 1]}", "{values: [0, 1], probabilities: [1]}", "probabilities"),
        ("{values: [0, 1]}", "{values: [0, 1], probabilities: 2}", "probabilities"),
        ("{values: [0, 1]}", "{values: [0, 1], probabilities: [.inf, 1]}", "probabilities"),
        ("{values: [0, 1]}", "{min: 0, max: .inf, distribution: int_uniform}", "numbers for min and max"),
        ("{values: [0, 1]}", "{min: -1e308, max: 1e308, distribution: q_uniform}", "numbers for min and max"),
        ("{values: [0, 1]}", "{min: 0, max: 1, distribution: q_uniform, q: 1e-320}", "q=1e-320"),
        ("{values: [0, 1]}", "{mu: .nan, sigma: 1, distribution: q_normal}", "numbers for mu and sigma"),
        ("{values: [0, 1]}", "{min: 3, max: 1}", "make no range"),
        ("{values: [0, 1]}", "{min: 0, max: 1, distribution: log_uniform_values}", "make no range"),
        ("{values: [0, 1]}", "{min: 0}", "numbers for min and max"),
        ("{values: [0, 1]}", "{min: 0, max: 1, distribution: unifrom}", "did you mean 'uniform'"),
        ("{values: [0, 1]}", "3", "must be {values"),
        ("align.train", "align.tarin", "runs align.train"),
        ('"${args_no_hyphens}", ', "", "where the parameters go"),
        ('"${args_no_hyphens}"', '"${args_no_hyphens}", "${program}"', "${program} is unknown"),
    ],
)
def test_what_is_wrong_names_its_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(UserError) as error:
        read_sweep(written(tmp_path, GOOD.replace(old, new)))
    assert says in str(error.value) and str(error.value).startswith("mine.yaml")
