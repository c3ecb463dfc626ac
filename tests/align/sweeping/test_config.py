"""W&B's sweep files, read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import FOLDER
from align.sweeping.config import MACROS, read_sweep

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
        (
            "method: grid",
            "method: bayes",
            "method=bayes is not supported by the local runner, which runs grid and random",
        ),
        ("method: grid", "method: gird", "did you mean 'grid'"),
        (
            "method: grid",
            "method: grid\nearly_terminate: {type: hyperband, min_iter: 3}",
            "trials run in full here",
        ),
        ("method: grid", "method: custom", "--method random runs here"),
        ("method: grid", "method: grid\nscheduler: {engine: optuna}", "needs W&B's service"),
        (
            "goal: maximize",
            "goal: maximize, target: 2.0",
            "metric: target is not supported by the local runner: only W&B's service",
        ),
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
        (
            "{values: [0, 1]}",
            "{min: 0, max: 1, distribution: log_uniform}",
            "log_uniform_values takes the limits",
        ),
        ("{values: [0, 1]}", "{min: 0, max: 1, distribution: q_log_uniform}", "q_log_uniform_values takes"),
        (
            "{values: [0, 1]}",
            "{min: 0, max: 1, distribution: inv_log_uniform}",
            "inv_log_uniform_values takes",
        ),
        (
            "{values: [0, 1]}",
            "{min: 0, max: 1.5, distribution: int_uniform}",
            "whole numbers for min and max",
        ),
        ("{values: [0, 1]}", "{a: 0, b: 1, distribution: beta}", "make no range"),
        ("{values: [0, 1]}", "{min: 0, max: 1, distribution: normal}", "unknown key 'min'"),
        ("{values: [0, 1]}", "{value: 1, distribution: uniform}", "unknown key 'value'"),
        (
            "{values: [0, 1]}",
            "{values: [0, 1], distribution: categorical_w_probabilities}",
            "probabilities must be",
        ),
        ("{values: [0, 1]}", "{distribution: 3}", "distribution=3 is unknown"),
        ("{values: [0, 1]}", "{parameters: {}}", "parameters.seed.parameters must name"),
        (
            "{values: [0, 1]}",
            "{parameters: {a: {vaules: [1]}}}",
            "parameters.seed.parameters.a: unknown key 'vaules'",
        ),
        ("{values: [0, 1]}", "{min: 0, max: 1, distribution: log_uniform_values}", "make no range"),
        ("{values: [0, 1]}", "{min: 0}", "numbers for min and max"),
        ("{values: [0, 1]}", "{min: 0, max: 1, distribution: unifrom}", "did you mean 'uniform'"),
        ("{values: [0, 1]}", "3", "must be {values"),
        ("align.train", "align.tarin", "runs align.train"),
        (
            "command:",
            "description:",
            'command must be a list that runs align.train, for instance ["python", "-m", ',
        ),
        ('"${args_no_hyphens}", ', "", "where the parameters go"),
        ('"${args_no_hyphens}"', '"${args_no_hyphens}", "${program}"', "${program} is unknown"),
    ],
)
def test_what_is_wrong_names_its_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(UserError) as error:
        read_sweep(written(tmp_path, GOOD.replace(old, new)))
    assert says in str(error.value) and str(error.value).startswith("mine.yaml")


@pytest.mark.parametrize(
    ("entry", "kind", "numbers"),
    [
        ("{min: 0, max: 1}", "int_uniform", (0, 1, 1.0)),
        ("{min: 0, max: 1.0}", "uniform", (0, 1.0, 1.0)),
        ("{distribution: normal}", "normal", (0.0, 1.0, 1.0)),
        ("{distribution: q_log_normal, mu: 2, q: 5}", "q_log_normal", (2, 1.0, 5)),
        ("{distribution: q_beta}", "q_beta", (1.0, 1.0, 1.0)),
    ],
)
def test_what_a_distribution_leaves_out_is_wandbs_default(
    tmp_path: Path, entry: str, kind: str, numbers: tuple[float, ...]
) -> None:
    (found,) = read_sweep(written(tmp_path, GOOD.replace("{values: [0, 1]}", entry))).parameters
    assert (found.distribution, (found.low, found.high, found.step)) == (kind, numbers)


def test_another_method_stands_for_the_files(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("method: grid", "method: bayes"))
    assert read_sweep(path, "random").method == "random"


def test_nested_parameters_are_read(tmp_path: Path) -> None:
    entry = "{parameters: {learning_rate: {values: [1e-4, 1e-3]}, deeper: {parameters: {x: {value: 3}}}}}"
    sweep = read_sweep(written(tmp_path, GOOD.replace("seed: {values: [0, 1]}", f"trainer: {entry}")))
    assert [(p.name, p.values) for p in sweep.parameters] == [
        ("trainer/learning_rate", (1e-4, 1e-3)),
        ("trainer/deeper/x", (3,)),
    ]


@pytest.mark.parametrize("macro", MACROS)
def test_every_macro_is_a_place_for_the_parameters(tmp_path: Path, macro: str) -> None:
    assert read_sweep(written(tmp_path, GOOD.replace("${args_no_hyphens}", macro))).words == (
        "recipe=debug_block",
    )


def test_a_command_sets_variables_and_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_RECIPE", "debug_taps")
    text = GOOD.replace('"${env}", ', '"${env}", "WANDB_MODE=offline", ').replace(
        "recipe=debug_block", "recipe=${envvar:MY_RECIPE}"
    )
    sweep = read_sweep(written(tmp_path, text))
    assert (sweep.environment, sweep.words) == (("WANDB_MODE=offline",), ("recipe=debug_taps",))


def test_a_program_without_a_command_is_wandbs_default(tmp_path: Path) -> None:
    text = GOOD.partition("command:")[0] + "program: align/train.py\n"
    sweep = read_sweep(written(tmp_path, text))
    assert (sweep.words, sweep.later) == ((), ())
