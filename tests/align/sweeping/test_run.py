"""Trials run once, in folders of their own, with the words that an agent would give; a sweep that was stopped goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from align.common.errors import UserError
from align.config.parser import FOLDER, load_recipe
from align.config.wandb_runs import TRIAL_VARIABLES
from align.sweeping.config import Parameter, Sweep, read_sweep
from align.sweeping.run import RESULT, Plan, Stopped, run, words_of
from align.sweeping.trials import trials

SHIPPED = sorted((FOLDER / "sweeps").glob("*.yaml"))
METRIC = "validation/tau_sampling"


def sweep(*parameters: Parameter) -> Sweep:
    return Sweep("s", "grid", METRIC, True, parameters or (Parameter("trainer.learning_rate", (1e-4, 2e-4, 3e-4, 4e-4)),), ("recipe=debug_block",), ())  # fmt: skip


class Trainer:
    """In the place of `subprocess.run`: writes metrics whose score grows with rate and steps. `fails`, `stops`: trials by number."""

    def __init__(self, fails: tuple[int, ...] = (), stops: tuple[int, ...] = ()) -> None:
        self.fails, self.stops, self.error, self.ran = fails, stops, "0.01", list[tuple[str, int]]()
        self.score: Any = None

    def __call__(self, command: list[str], stdout: Any, **options: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "align.train"]
        recipe = load_recipe(command[3:])
        output = Path(recipe.output)
        number = int(next(part for part in output.parts if part.isdigit() and len(part) == 4))
        self.ran.append((output.name, recipe.trainer.max_steps))
        if number in self.stops:
            return SimpleNamespace(returncode=130)
        if number in self.fails:
            stdout.write(b"one line\nerror: it is broken\n")
            return SimpleNamespace(returncode=2)
        score = self.score or 1 + recipe.trainer.learning_rate * recipe.trainer.max_steps
        (output / "metrics.csv").write_text(f"step,{METRIC},{METRIC}_se\n1,1.0,0.5\n9,{score},{self.error}\n")
        return SimpleNamespace(returncode=0)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    found = Trainer()
    monkeypatch.setattr("align.sweeping.run.subprocess.run", found)
    return found


def quiet(line: str) -> None:
    """Nobody listens."""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_the_shipped_command_lines_are_an_agents(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every trial of the grid: W&B's own code makes the command line, and its words are a recipe's; ours are the same but for the folder,
    the logger and going on."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    import yaml

    content = yaml.safe_load(path.read_text())
    own = read_sweep(path)
    for trial in trials(own, None, 0):
        made = utils.create_sweep_command_args({"args": {k: {"value": v} for k, v in trial.values}})
        made["env"] = ["/usr/bin/env"]
        line: list[str] = []
        for word in utils.create_sweep_command(list(content["command"])):
            line += made[word[2:-1]] if word.startswith("${") else [word]
        assert line[:5] == ["/usr/bin/env", "WANDB_MODE=offline", "python", "-m", "align.train"]
        theirs, ours = (
            load_recipe(line[5:]),
            load_recipe(words_of(own, trial, Plan(tmp_path))),
        )
        ours.output, ours.data.path = theirs.output, theirs.data.path
        ours.trainer.logger, ours.trainer.resume = theirs.trainer.logger, theirs.trainer.resume
        assert ours == theirs


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_command_line_runs(path: Path, tmp_path: Path) -> None:
    """The whole command line of an agent, executed; --print ends it before a model is opened (tests/align/training/test_loggers.py runs one
    to its end under the real agent)."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    import os

    import yaml

    content, own = yaml.safe_load(path.read_text()), read_sweep(path)
    made = utils.create_sweep_command_args(
        {"args": {k: {"value": v} for k, v in trials(own, 1, 0)[0].values}}
    )
    line = ["/usr/bin/env"]
    for word in content["command"][1:]:
        line += made[word[2:-1]] if word.startswith("${") else [word]
    path_with_us = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*line, "--print"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PATH": path_with_us, "PYTHONPATH": str(FOLDER.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["trainer"]["logger"] == ["wandb"]


def test_every_trial_runs_once(trainer: Trainer, tmp_path: Path) -> None:
    own, plan = sweep(), Plan(tmp_path)
    found = trials(own, None, 0)
    results = run(own, found, plan, quiet)
    assert [r.score for r in results] == pytest.approx([1 + 12 * rate for rate in (1e-4, 2e-4, 3e-4, 4e-4)])
    assert {r.error for r in results} == {0.01} and len(trainer.ran) == 4
    assert run(own, found, plan, quiet) == results and len(trainer.ran) == 4


def test_a_sweep_that_was_stopped_goes_on(trainer: Trainer, tmp_path: Path) -> None:
    own, plan = sweep(), Plan(tmp_path)
    found = trials(own, None, 0)
    trainer.stops = (2,)
    with pytest.raises(Stopped, match="0002"):
        run(own, found, plan, quiet)
    trainer.stops, trainer.ran = (), []
    assert len(run(own, found, plan, quiet)) == 4
    assert [name for name, _ in trainer.ran] == ["0002", "0003"]


def test_a_failed_trial_is_tried_again(trainer: Trainer, tmp_path: Path) -> None:
    own, plan = sweep(), Plan(tmp_path)
    found = trials(own, None, 0)
    trainer.fails = (1,)
    assert [r.failed for r in run(own, found, plan, quiet)] == ["", "error: it is broken", "", ""]
    trainer.fails, trainer.ran = (), []
    assert not any(r.failed for r in run(own, found, plan, quiet)) and trainer.ran == [("0001", 12)]


def test_a_trial_without_a_score_has_failed(trainer: Trainer, tmp_path: Path) -> None:
    """And is tried again, as the command says."""
    own, plan = sweep(Parameter("seed", (1,))), Plan(tmp_path)
    trainer.score = "nan"
    for _ in range(2):
        assert "is no number" in run(own, trials(own, None, 0), plan, quiet)[0].failed
    assert len(trainer.ran) == 2


def test_an_unknown_metric_ends_the_sweep_after_one_trial(trainer: Trainer, tmp_path: Path) -> None:
    """After a correction the sweep resumes in the same folder."""
    own, plan = sweep(Parameter("seed", (1, 2))), Plan(tmp_path)
    with pytest.raises(UserError, match=f"did you mean '{METRIC}'"):
        run(replace(own, metric=f"{METRIC}x"), trials(own, None, 0), plan, quiet)
    assert len(trainer.ran) == 1
    assert not any(r.failed for r in run(own, trials(own, None, 0), plan, quiet))


def test_another_metric_is_read_from_finished_trials(trainer: Trainer, tmp_path: Path) -> None:
    own, plan = sweep(Parameter("seed", (1,))), Plan(tmp_path)
    first = run(own, trials(own, None, 0), plan, quiet)[0]
    other = run(replace(own, metric=f"{METRIC}_se"), trials(own, None, 0), plan, quiet)[0]
    assert len(trainer.ran) == 1 and other.score == first.error


def test_a_folder_for_all_trials_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    own = sweep(Parameter("seed", (1,)))
    with pytest.raises(UserError, match="every trial has its own folder"):
        run(own, trials(own, None, 0), Plan(tmp_path, ("output=x",)), quiet)
    assert trainer.ran == []


def test_a_result_that_cannot_be_read_is_made_again(trainer: Trainer, tmp_path: Path) -> None:
    """What has no standard error is stored as JSON has it; a torn or foreign result is no result."""
    own, plan = sweep(), Plan(tmp_path)
    found, trainer.error = trials(own, 3, 0), ""
    first = run(own, found, plan, quiet)
    for number, text in enumerate(('{"number": 0, "ste', '{"number": 0}')):
        path = tmp_path / "trials" / f"{number:04d}" / RESULT
        assert json.loads(path.read_text())["error"] is None
        path.write_text(text)
    trainer.ran, said = [], list[str]()
    again = run(own, found, plan, said.append)
    assert [r.score for r in again] == [r.score for r in first]
    assert trainer.ran == [("0000", 12), ("0001", 12)]
    assert [line for line in said if line.startswith("warning:") and "run again" in line] == [
        said[0],
        said[3],
    ]


def test_another_sweep_in_the_folder_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    own = sweep()
    run(own, trials(own, 2, 0), Plan(tmp_path), quiet)
    run(own, trials(own, 4, 0), Plan(tmp_path), quiet)  # more of the same
    assert [name for name, _ in trainer.ran] == ["0000", "0001", "0002", "0003"]
    run(own, trials(own, 2, 0), Plan(tmp_path), quiet)
    for plan, other in ((Plan(tmp_path, ("seed=3",)), own), (Plan(tmp_path), sweep(Parameter("seed", (1,))))):
        with pytest.raises(UserError, match="another --out"):
            run(other, trials(other, None, 0), plan, quiet)


def test_text_is_shared_where_no_trial_changes_it(tmp_path: Path) -> None:
    def recipe(parameter: Parameter, *words: str, plan: Plan | None = None):
        own = Sweep("s", "grid", METRIC, True, (parameter,), ("recipe=debug_block", *words), ())
        return load_recipe(words_of(own, trials(own, None, 0)[0], plan or Plan(tmp_path)))

    rate = Parameter("trainer.learning_rate", (1e-4,))
    assert recipe(rate).data.path == str(tmp_path / "data")
    seeds = [recipe(Parameter("seed", (seed,))).data_folder for seed in (1, 1, 2)]
    sizes = [recipe(Parameter(name, (9,))).data_folder for name in ("data.samples", "data/samples")]
    assert seeds[0] == seeds[1] and sizes[0] == sizes[1]
    assert len({tmp_path / "data", *seeds, *sizes}) == 4 and {p.parent for p in (*seeds, *sizes)} == {
        tmp_path
    }
    assert recipe(rate, "data.path=there").data.path == "there"
    assert recipe(rate, "trainer.logger=wandb").trainer.logger == ["csv"]
    assert recipe(rate, "trainer.logger=wandb", plan=Plan(tmp_path, wandb=True)).trainer.logger == [
        "csv",
        "wandb",
    ]
    assert recipe(rate, plan=Plan(tmp_path, ("trainer.learning_rate=9e-3",))).trainer.learning_rate == 9e-3


def test_wrong_words_stop_it_before_anything_runs(trainer: Trainer, tmp_path: Path) -> None:
    own = sweep(Parameter("trainer.learning_rat", (1,)))
    found = r"^sweep s, trial .*trainer.learning_rat=1: .*did you mean 'trainer.learning_rate'"
    with pytest.raises(UserError, match=found):
        run(own, trials(own, None, 0), Plan(tmp_path), quiet)
    assert trainer.ran == [] and not (tmp_path / "sweep.json").exists()


@pytest.mark.parametrize(
    ("name", "fixed"),
    [("trainer.learning_rate", ("trainer.learning_rate=9e-3",)), ("recipe", ()), ("output", ())],
)
def test_what_is_swept_is_given_nowhere_else(
    trainer: Trainer, tmp_path: Path, name: str, fixed: tuple[str, ...]
) -> None:
    """All trials would be the same run, and the table call them several."""
    own = sweep(Parameter(name, (1e-4, 2e-4)))
    with pytest.raises(UserError, match=f"^sweep s: {name} is swept, and given for every trial"):
        run(own, trials(own, None, 0), Plan(tmp_path, fixed), quiet)
    assert trainer.ran == [] and not (tmp_path / "sweep.json").exists()


def test_a_device_in_the_place_of_the_log_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    log = tmp_path / "trials" / trials(sweep(), None, 0)[0].name / "log.txt"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/null")
    with pytest.raises(OSError, match=r"is no ordinary file.*log.txt"):
        run(sweep(), trials(sweep(), None, 0), Plan(tmp_path), quiet)
    assert not trainer.ran


def test_an_agents_variables_reach_no_trial_and_the_commands_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trial that took an agent's run id would write somewhere else, and log into that run."""
    seen: list[dict[str, str]] = []

    def start(command: list[str], env: dict[str, str], **options: Any) -> Any:
        seen.append(env)
        return SimpleNamespace(returncode=2)

    for name in TRIAL_VARIABLES:
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr("align.sweeping.run.subprocess.run", start)
    own = replace(sweep(Parameter("seed", (1,))), environment=("WANDB_MODE=offline",))
    run(own, trials(own, None, 0), Plan(tmp_path), quiet)
    assert seen[0]["WANDB_MODE"] == "offline" and not seen[0].keys() & {*TRIAL_VARIABLES}


def test_whole_floats_that_are_drawn_for_integer_keys_run(trainer: Trainer, tmp_path: Path) -> None:
    own = replace(sweep(Parameter("trainer.batch_size", (), (), "q_uniform", 2, 8, 2.0)), method="random")
    found = trials(own, 3, 0)
    assert all(isinstance(trial.values[0][1], float) for trial in found)
    assert not any(result.failed for result in run(own, found, Plan(tmp_path), quiet))


def test_a_sweep_that_an_earlier_version_began_is_resumed(trainer: Trainer, tmp_path: Path) -> None:
    """Its record has the keys of successive halving, which this version has not."""
    own = sweep()
    run(own, trials(own, None, 0), Plan(tmp_path), quiet)
    record = json.loads((tmp_path / "sweep.json").read_text())
    (tmp_path / "sweep.json").write_text(json.dumps(record | {"eta": None, "least": 1}))
    trainer.ran = []
    run(own, trials(own, None, 0), Plan(tmp_path), quiet)
    assert trainer.ran == []
