"""Running trials, one after the other, each in a process and a folder of its own; what is done is not done again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from align.common.errors import UserError
from align.common.files import check_ordinary, write_json, write_text
from align.common.schema import convert, read_json, read_object
from align.common.text import short
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.sweeping.config import Sweep
from align.sweeping.halving import best, rungs
from align.sweeping.trials import Trial, key

RECORD, RESULT = "sweep.json", "result.json"
_SAID = {
    "sweep": "file",
    "fixed": "set of words for all trials",
    "eta": "--eta",
    "least": "least number of steps",
}
_SHARED = ("data.", "target.", "seed")
"""Keys on which the text depends: where a sweep changes none of them, all trials read one data folder."""


@dataclass(frozen=True)
class Result:
    """What a trial came to. score: the metric at its end; error: its standard error, where the run says it. failed: the last line of
    a run that ended otherwise."""

    number: int
    steps: int
    score: float = math.nan
    error: float = math.nan
    failed: str = ""


@dataclass(frozen=True)
class Plan:
    """How a sweep runs. fixed: recipe words of all trials, stronger than the file's. eta: of successive halving; None = every trial in
    full. least: steps of the first rung."""

    folder: Path
    fixed: tuple[str, ...] = ()
    eta: int | None = None
    least: int = 1
    wandb: bool = False


class Stopped(RuntimeError):
    """A trial was stopped by a signal: the sweep stops, and goes on with the same command."""


def record(sweep: Sweep, found: Sequence[Trial], plan: Plan) -> None:
    """Write down what is swept, or compare with what was begun.

    Raises:
        UserError: the folder holds another sweep.
    """
    path = plan.folder / RECORD
    now: dict[str, Any] = {
        "sweep": asdict(replace(sweep, cap=None)),
        "trials": [key(trial) for trial in found],
        "fixed": list(plan.fixed),
        "eta": plan.eta,
        "least": plan.least,
    }
    now = json.loads(json.dumps(now))
    if path.is_file():
        before = read_object(path)
        for name in ("sweep", "fixed", "eta", "least"):
            if before.get(name) != now[name]:
                was, given = (short(json.dumps(values.get(name)), 120) for values in (before, now))
                raise UserError(
                    f"{path}: a sweep of another {_SAID[name]} was begun there ({was}; now {given}); give another --out, or what was given then"
                )
        old = before.get("trials")
        if not isinstance(old, list) or old[: len(now["trials"])] != now["trials"][: len(old)]:
            raise UserError(
                f"{path}: other trials were begun there (--count, --method, --seed); give another --out"
            )
        if plan.eta is not None and len(old) != len(now["trials"]):
            raise UserError(
                f"{path}: a halving of {len(old)} trials was begun there; give --count {len(old)}, or another --out"
            )
        if len(old) > len(now["trials"]):
            return
    write_json(path, now)


def words_of(sweep: Sweep, trial: Trial, plan: Plan, output: Path) -> list[str]:
    """The recipe words of a trial: the file's command with its parameters, as an agent would give them; then a folder of its own, metrics
    in a file, going on after a stop, and what is fixed."""
    words = [*sweep.words, *trial.words, *sweep.later]
    logger = next((w.split("=", 1)[1] for w in words if w.startswith("trainer.logger=")), "csv")
    loggers = [
        "csv",
        *(
            name
            for name in logger.split(",")
            if name not in ("csv", "wandb") or (name == "wandb" and plan.wandb)
        ),
    ]
    own = [f"output={output}", f"trainer.logger={','.join(loggers)}", "trainer.resume=auto"]
    swept = {name for name, _ in trial.values}
    if not any(name.startswith(_SHARED) for name in swept) and not any(
        w.startswith("data.path=") for w in words
    ):
        own.append(f"data.path={plan.folder / 'data'}")
    merged: dict[str, str] = {}
    for word in [*words, *own, *plan.fixed]:
        name, _, value = word.removeprefix("--").partition("=")
        merged.pop(name, None)
        merged[name] = value
    return [f"{name}={value}" for name, value in merged.items()]


def full_recipe(sweep: Sweep, trial: Trial, plan: Plan) -> Recipe:
    """The trial's recipe, every step of it. Raises UserError for words that no recipe takes; it names the sweep and the trial."""
    words = words_of(sweep, trial, plan, plan.folder / "trials" / trial.name)
    try:
        return load_recipe(words)
    except UserError as error:
        what = str(error).removeprefix("command line: ")
        raise UserError(f"sweep {sweep.name}, trial {' '.join(trial.words)}: {what}") from None


def run(sweep: Sweep, found: Sequence[Trial], plan: Plan, say: Callable[[str], object]) -> list[Result]:
    """All trials in turn, or rung by rung. Returns a result of each trial, the last one it came to.

    Raises:
        UserError: words that no recipe takes, before anything runs. Stopped: a signal.
    """
    given = {word.removeprefix("--").partition("=")[0] for word in (*sweep.words, *sweep.later, *plan.fixed)}
    for name in (parameter.name for parameter in sweep.parameters):
        if name in given or name == "output":
            raise UserError(
                f"sweep {sweep.name}: {name} is swept, and given for every trial; take it out of the parameters, or of the other words"
            )
    recipes = {trial.number: full_recipe(sweep, trial, plan) for trial in found}
    record(sweep, found, plan)
    if plan.eta is None:
        return [_trial(sweep, trial, plan, None, say) for trial in found]
    steps = {recipe.trainer.max_steps for recipe in recipes.values()}
    if len(steps) > 1:
        raise UserError(f"{sweep.name}: halving shares out trainer.max_steps, so a sweep can't change it")
    every, alive, last = steps.pop(), [trial.number for trial in found], dict[int, Result]()
    by_number = {trial.number: trial for trial in found}
    for rung, (count, few) in enumerate(rungs(len(found), plan.eta, every, plan.least)):
        if rung:
            alive = best([(n, last[n].score) for n in alive], count, sweep.maximise)
        say(f"rung {rung + 1}: {len(alive)} trials of {few} steps")
        for number in alive:
            warmup = max(0, round(recipes[number].trainer.warmup_steps * few / every))
            own = None if few == every else (few, warmup)
            last[number] = _trial(sweep, by_number[number], plan, own, say)
    return [last[trial.number] for trial in found]


def _trial(
    sweep: Sweep, trial: Trial, plan: Plan, shorter: tuple[int, int] | None, say: Callable[[str], object]
) -> Result:
    """One run, or what it came to before. `shorter`: its steps and those of its warm-up."""
    output = plan.folder / "trials" / trial.name
    words = words_of(sweep, trial, plan, output)
    if shorter is not None:
        output = output / f"steps-{shorter[0]}"
        short = replace(
            plan, fixed=(*plan.fixed, f"trainer.max_steps={shorter[0]}", f"trainer.warmup_steps={shorter[1]}")
        )
        words = words_of(sweep, trial, short, output)
    steps = load_recipe(words).trainer.max_steps
    path = output / RESULT
    if path.is_file():
        try:
            return _read(path)
        except UserError as error:  # its training is over, or goes on where it was
            say(f"warning: {error}; the trial is run again")
    say(f"trial {trial.name}: {' '.join(trial.words)}" + (f" ({shorter[0]} steps)" if shorter else ""))
    output.mkdir(parents=True, exist_ok=True)
    log_file = output / "log.txt"
    check_ordinary(log_file)
    with log_file.open("ab") as log:
        code = subprocess.run(
            [sys.executable, "-m", "align.train", *words], stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code == 130 or code < 0:
        raise Stopped(f"trial {trial.name} was stopped; the same command goes on with it")
    if code:
        lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        result = Result(trial.number, steps, failed=(lines or [f"exit code {code}"])[-1])
        say(f"  failed: {result.failed}")
        return result  # not written down: it is tried again when the sweep goes on
    result = _score(sweep, trial.number, steps, output)
    if result.failed:
        say(f"  failed: {result.failed}")
        return result
    values = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(result).items()
    }
    text = json.dumps(values) + "\n"
    write_text(path, text)
    say(f"  {sweep.metric} {result.score:.4f}")
    return result


class _Stored(TypedDict):
    """A result as JSON, which has no NaN."""

    number: int
    steps: int
    score: float | None
    error: float | None
    failed: str


def _read(path: Path) -> Result:
    values = convert(read_json(path), _Stored, "", str(path))
    score, error = (math.nan if values[k] is None else values[k] for k in ("score", "error"))
    return Result(values["number"], values["steps"], score, error, values["failed"])


def _score(sweep: Sweep, number: int, steps: int, output: Path) -> Result:
    """The last value of the metric in metrics.csv, and its standard error where a column holds it."""
    from align.training.loggers import MetricsFile

    rows = [row for row in MetricsFile(output / "metrics.csv").read() if sweep.metric in row]
    if not rows:
        return Result(number, steps, failed=f"{sweep.metric} is not among its metrics")
    score, error = (_value(rows[-1].get(name, "")) for name in (sweep.metric, f"{sweep.metric}_se"))
    failed = "" if math.isfinite(score) else f"{sweep.metric} is no number at its end"
    return Result(number, steps, score, error, failed)


def _value(text: str) -> float:
    """A cell's number; NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
