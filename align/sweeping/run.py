"""Running a sweep's trials one after another, each as a process of `align.train` in its own folder,
and their table."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from align.config.parser import load_recipe
from align.config.wandb_runs import TRIAL_VARIABLES, text_folder_name
from align.planning.tau import t_quantile
from align.sweeping.config import SweepFile
from align.training.loggers import MetricsFile
from specalign.common.errors import UserError, nearest
from specalign.common.files import check_ordinary, write_json
from specalign.common.text import markdown_text, say

FINISHED = "finished.json"


@dataclass(frozen=True)
class TrialResult:
    """A trial's swept values, and the metric at its end with its standard error. failed: the error
    if it failed."""

    values: dict[str, str]
    score: float = math.nan
    error: float = math.nan
    failed: str = ""


def run_sweep(
    sweep: SweepFile, trials: Sequence[dict[str, str]], folder: Path, fixed: dict[str, str]
) -> list[TrialResult]:
    """Run the trials that have not finished yet. `fixed`: recipe arguments of all of them.

    Raises:
        UserError: arguments that no recipe takes, before anything runs. KeyboardInterrupt: a trial
            was interrupted.
    """
    given = {*fixed, *(sweep.arguments.keys() - {"output"})}
    clashes = sorted({"output", *sweep.parameters} & given)
    if clashes:
        raise UserError(
            f"sweep {sweep.name}: {clashes[0]} differs between trials, so it can't be given for "
            "all of them"
        )
    arguments = [build_arguments(sweep, values, folder, fixed) for values in trials]
    return [_run_trial(sweep, *pair) for pair in zip(trials, arguments, strict=True)]


def build_arguments(
    sweep: SweepFile, values: dict[str, str], folder: Path, fixed: dict[str, str]
) -> dict[str, str]:
    """A trial's recipe arguments: those that an agent would pass, its output folder and the folder
    of its text; not the logger wandb.

    The output folder is named by a hash of the arguments, so that a rerun finds what has finished.
    """
    given = {**sweep.arguments, **values, **fixed, "trainer.resume": "auto"}
    given.pop("output", None)
    loggers = given.get("trainer.logger", "csv").replace("wandb", "csv").split(",")
    given["trainer.logger"] = ",".join(dict.fromkeys(["csv", *loggers]))
    try:
        recipe = load_recipe(_join(given))
    except UserError as error:
        raise UserError(f"sweep {sweep.name}, trial {' '.join(_join(values))}: {error}") from None
    if recipe.data.path is None:
        given["data.path"] = str(folder / text_folder_name(recipe, given))
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
    given["output"] = str(folder / "trials" / digest[:12])
    return given


def _join(arguments: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in arguments.items()]


def _run_trial(sweep: SweepFile, values: dict[str, str], arguments: dict[str, str]) -> TrialResult:
    output = Path(arguments["output"])
    if not (output / FINISHED).is_file():
        say(f"trial {output.name}: {' '.join(_join(values))}", error=True)
        failed = _train(arguments, sweep.environment, output)
        if failed:
            say(f"  failed: {failed}", error=True)
            return TrialResult(values, failed=failed)
        write_json(output / FINISHED, arguments)
    rows = MetricsFile(output / "metrics.csv").read()
    measured = [row for row in rows if sweep.metric in row]
    if not measured:
        near = nearest(sweep.metric, {name for row in rows for name in row if "/" in name})
        raise UserError(f"sweep {sweep.name}: metric {sweep.metric!r} was not logged{near}")
    last = measured[-1]
    error = float(last.get(f"{sweep.metric}_se", "nan"))
    return TrialResult(values, float(last[sweep.metric]), error)


def _train(arguments: dict[str, str], variables: dict[str, str], output: Path) -> str:
    """Run `align.train`; returns the last line of its log if it failed."""
    output.mkdir(parents=True, exist_ok=True)
    log = output / "log.txt"
    check_ordinary(log)
    # an agent's variables would send all trials into its own W&B run
    inherited = {name: value for name, value in os.environ.items() if name not in TRIAL_VARIABLES}
    command = [sys.executable, "-m", "align.train", *_join(arguments)]
    with log.open("ab") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=inherited | variables, check=False
        )
    if done.returncode == 130 or done.returncode < 0:
        raise KeyboardInterrupt
    if done.returncode == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def render_table(sweep: SweepFile, results: Sequence[TrialResult]) -> str:
    """Markdown: the score of each combination with a 95% interval, over its seeds or of its only
    run, the best first."""
    keys = [key for key in sweep.parameters if key != "seed"]
    distinct = {tuple(result.values.items()): result for result in results}
    groups: dict[tuple[str, ...], list[TrialResult]] = defaultdict(list)
    for result in distinct.values():  # a trial drawn twice counts once
        groups[tuple(result.values[key] for key in keys)].append(result)
    sign = -1 if sweep.maximize else 1
    rows = [(*_average(members), cells, members) for cells, members in groups.items()]
    rows.sort(key=lambda row: sign * row[0] if math.isfinite(row[0]) else math.inf)
    titles = " | ".join(map(markdown_text, [*keys, sweep.metric]))
    lines = [f"| {titles} [95%] | runs |", "|---" * (len(keys) + 2) + "|"]
    for score, width, cells, members in rows:
        failed = [member.failed for member in members if member.failed]
        runs = len(members) - len(failed)
        interval = f" [{score - width:.4f}, {score + width:.4f}]" if math.isfinite(width) else ""
        text = f"{score:.4f}{interval}" if runs else f"failed: {failed[0]}"
        lines.append(f"| {' | '.join(map(markdown_text, [*cells, text]))} | {runs} |")
    return "\n".join(lines)


def _average(members: Sequence[TrialResult]) -> tuple[float, float]:
    """The mean score, and half the width of its 95% interval; NaN if unknown."""
    finished = [member for member in members if not member.failed]
    scores = [member.score for member in finished]
    if len(scores) > 1:
        error = stdev(scores) / math.sqrt(len(scores))
        return mean(scores), t_quantile(0.975, len(scores) - 1) * error
    return (scores[0], 1.96 * finished[0].error) if scores else (math.nan, math.nan)
