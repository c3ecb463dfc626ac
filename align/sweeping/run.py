"""Running trials in turn, each in its own process and folder; finished trials are not run again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from align.common.errors import UserError, nearest
from align.common.files import check_ordinary, write_json, write_text
from align.common.schema import convert, read_json, read_object
from align.common.text import short
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.config.wandb_runs import TRIAL_VARIABLES, text_folder_name
from align.sweeping.config import NESTED, Sweep
from align.sweeping.trials import Trial, key

RECORD, RESULT = "sweep.json", "result.json"
_NOT_COMPARED = ("cap", "environment", "metric", "maximise")
"""Fields of a sweep that may change when it is resumed: finished trials stay what they are."""


@dataclass(frozen=True)
class Result:
    """The outcome of a trial.

    Attributes:
        score: the metric at its end. error: its standard error, where the run logs it.
        failed: the last line of a run that failed.
        metric: the score's name.
    """

    number: int
    steps: int
    score: float = math.nan
    error: float = math.nan
    failed: str = ""
    metric: str = ""


@dataclass(frozen=True)
class Plan:
    """How a sweep runs. fixed: arguments of all trials, which win over the file's."""

    folder: Path
    fixed: tuple[str, ...] = ()
    wandb: bool = False


class Stopped(RuntimeError):
    """A trial was stopped by a signal: the sweep stops, and the same command resumes it."""


def record(sweep: Sweep, found: Sequence[Trial], plan: Plan) -> None:
    """Write down what is swept, or compare it with what was begun.

    Raises:
        UserError: the folder holds another sweep.
    """
    path = plan.folder / RECORD
    content = {name: value for name, value in asdict(sweep).items() if name not in _NOT_COMPARED}
    now: dict[str, Any] = {
        "sweep": content,
        "trials": [key(trial) for trial in found],
        "fixed": list(plan.fixed),
    }
    now = json.loads(json.dumps(now))
    if path.is_file():
        before = read_object(path)
        for name, what in (("sweep", "file"), ("fixed", "set of arguments for all trials")):
            if before.get(name) != now[name]:
                was, given = (short(json.dumps(values.get(name)), 120) for values in (before, now))
                raise UserError(
                    f"{path}: a sweep of another {what} was begun there ({was}; now {given}); give another --out, or what was given then"
                )
        old = before.get("trials")
        if not isinstance(old, list) or old[: len(now["trials"])] != now["trials"][: len(old)]:
            raise UserError(
                f"{path}: other trials were begun there (--count, --method, --seed); give another --out"
            )
        if len(old) > len(now["trials"]):
            return
    write_json(path, now)


def words_of(sweep: Sweep, trial: Trial, plan: Plan) -> list[str]:
    """List a trial's arguments: those that an agent would give it, then its folders, metrics in a file, and what is fixed."""
    words = [*sweep.words, *trial.words, *sweep.later]
    logger = next((w.split("=", 1)[1] for w in words if w.startswith("trainer.logger=")), "csv")
    loggers = [name for name in logger.split(",") if name != "csv" and (name != "wandb" or plan.wandb)]
    own = [
        f"output={plan.folder / 'trials' / trial.name}",
        f"trainer.logger={','.join(['csv', *loggers])}",
        "trainer.resume=auto",
    ]
    if not any(w.startswith("data.path=") for w in words):
        swept = [name.replace(NESTED, ".") for name, _ in trial.values]
        text = text_folder_name(load_recipe(_merge([*words, *plan.fixed])), swept)
        own.append(f"data.path={plan.folder / text}")
    return _merge([*words, *own, *plan.fixed])


def _merge(words: Sequence[str]) -> list[str]:
    """Keep the last argument of each key."""
    merged: dict[str, str] = {}
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        merged.pop(name, None)
        merged[name] = value
    return [f"{name}={value}" for name, value in merged.items()]


def read_recipe(sweep: Sweep, trial: Trial, plan: Plan) -> Recipe:
    """Return the trial's recipe. Raises UserError for arguments that no recipe takes; it names the sweep and the trial."""
    try:
        return load_recipe(words_of(sweep, trial, plan))
    except UserError as error:
        what = str(error).removeprefix("command line: ")
        raise UserError(f"sweep {sweep.name}, trial {' '.join(trial.words)}: {what}") from None


def run(sweep: Sweep, found: Sequence[Trial], plan: Plan, say: Callable[[str], object]) -> list[Result]:
    """Run all trials in turn, and return the result of each.

    Raises:
        UserError: arguments that no recipe takes, before anything runs. Stopped: a signal.
    """
    if any(word.removeprefix("--").startswith("output=") for word in plan.fixed):
        raise UserError(f"output=: every trial has its own folder in {plan.folder}; --out names another one")
    given = {word.removeprefix("--").partition("=")[0] for word in (*sweep.words, *sweep.later, *plan.fixed)}
    for name in (parameter.name.replace(NESTED, ".") for parameter in sweep.parameters):
        if name in given or name == "output":
            raise UserError(
                f"sweep {sweep.name}: {name} is swept, and given for every trial; take it out of the parameters, or of the other words"
            )
    if any(word.removeprefix("--").startswith("output=") for word in (*sweep.words, *sweep.later)):
        say(
            f"note: sweep {sweep.name}: output= of its command is for agents; these trials are in {plan.folder} (--out)"
        )
    steps = {trial.number: read_recipe(sweep, trial, plan).trainer.max_steps for trial in found}
    record(sweep, found, plan)
    return [_run_trial(sweep, trial, plan, steps[trial.number], say) for trial in found]


def _run_trial(sweep: Sweep, trial: Trial, plan: Plan, steps: int, say: Callable[[str], object]) -> Result:
    """Run one trial, or read the result of an earlier run."""
    output = plan.folder / "trials" / trial.name
    path = output / RESULT
    if path.is_file():
        try:
            before = _read(path)
            return before if before.metric == sweep.metric else _score(sweep, trial.number, steps, output)
        except UserError as error:  # its training is over, or is resumed
            say(f"warning: {error}; the trial is run again")
    say(f"trial {trial.name}: {' '.join(trial.words)}")
    output.mkdir(parents=True, exist_ok=True)
    log_file = output / "log.txt"
    check_ordinary(log_file)
    code = _train(words_of(sweep, trial, plan), sweep.environment, log_file)
    if code == 130 or code < 0:
        raise Stopped(f"trial {trial.name} was stopped; the same command resumes it")
    if code:
        lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        result = Result(trial.number, steps, failed=(lines or [f"exit code {code}"])[-1])
    else:
        result = _score(sweep, trial.number, steps, output)
    if result.failed:
        say(f"  failed: {result.failed}")
        return result  # not written down: it is tried again when the sweep is resumed
    finite = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(result).items()
    }
    write_text(path, json.dumps(finite) + "\n")
    say(f"  {sweep.metric} {result.score:.4f}")
    return result


def _train(words: Sequence[str], variables: Sequence[str], log_file: Path) -> int:
    """Run `align.train` with these arguments and environment variables; returns its exit code."""
    # an agent's variables would send all trials into its own run
    environment = {name: value for name, value in os.environ.items() if name not in TRIAL_VARIABLES}
    environment |= dict(variable.split("=", 1) for variable in variables)
    command = [sys.executable, "-m", "align.train", *words]
    with log_file.open("ab") as log:
        return subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode


class _Stored(TypedDict):
    """A result as JSON, which has no NaN."""

    number: int
    steps: int
    score: float | None
    error: float | None
    failed: str
    metric: str


def _read(path: Path) -> Result:
    values = convert(read_json(path), _Stored, "", str(path))
    score, error = (math.nan if values[k] is None else values[k] for k in ("score", "error"))
    return Result(values["number"], values["steps"], score, error, values["failed"], values["metric"])


def _score(sweep: Sweep, number: int, steps: int, output: Path) -> Result:
    """The last value of the metric in metrics.csv, and its standard error where a column holds it."""
    from align.training.loggers import MetricsFile

    rows = [row for row in MetricsFile(output / "metrics.csv").read() if sweep.metric in row]
    if not rows:
        logged = MetricsFile(output / "metrics.csv").read()
        columns = {name for row in logged for name in row if "/" in name}
        raise UserError(
            f"sweep {sweep.name}: metric {sweep.metric!r} is not among the metrics of its trials{nearest(sweep.metric, columns)}; "
            f"correct it and run the same command again, or see {output / 'log.txt'} for why it was not measured"
        )
    score, error = (_value(rows[-1].get(name, "")) for name in (sweep.metric, f"{sweep.metric}_se"))
    failed = "" if math.isfinite(score) else f"{sweep.metric} is no number at its end"
    return Result(number, steps, score, error, failed, sweep.metric)


def _value(text: str) -> float:
    """A cell's number; NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
