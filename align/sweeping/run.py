"""A sweep file in W&B's format, run on this machine: its trials one after another, each a process of
`align.train` in its own folder, and their table."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from align.config.parser import load_recipe
from align.config.wandb_runs import TRIAL_VARIABLES, text_folder_name
from align.planning.tau import t_quantile
from align.training.loggers import MetricsFile
from specalign.common.errors import UserError, nearest
from specalign.common.files import check_ordinary, read_text, write_json
from specalign.common.schema import JsonObject, convert, finite
from specalign.common.strict_yaml import parse_yaml
from specalign.common.text import markdown_text, say, short

KEYS = (
    "method", "metric", "parameters", "command", "program", "run_cap", "name", "description",
    "project", "entity",
)  # fmt: skip
PARAMETER_KEYS = ("value", "values", "min", "max", "q", "distribution")
RANGES = (
    "uniform", "int_uniform", "log_uniform_values", "q_uniform", "q_log_uniform_values",
)  # fmt: skip
METRIC = {"name": "validation/loss", "goal": "minimize"}  # W&B requires one for bayes only
MAX_TRIALS = 10_000
USE_AGENT = "is not supported by the local runner; use `wandb sweep` and `wandb agent`"
FINISHED = "finished.json"


@dataclass(frozen=True)
class SweepParameter:
    """Values to try of a recipe key: listed ones, or a range from `low` to `high`, also in multiples
    of `step`."""

    values: tuple[Any, ...] = ()
    distribution: str = ""
    low: float = 0
    high: float = 0
    step: float = 1

    def draw(self, generator: random.Random) -> Any:
        if self.values:
            return generator.choice(self.values)
        if self.distribution == "int_uniform":
            return generator.randint(int(self.low), int(self.high))
        if self.distribution.endswith("log_uniform_values"):
            drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = generator.uniform(self.low, self.high)
        if not self.distribution.startswith("q_"):
            return drawn
        return round(round(drawn / self.step) * self.step, 12)  # without 0.30000000000000004


@dataclass(frozen=True)
class SweepFile:
    """A sweep file. parameters: by recipe key. arguments, environment: what its command sets for
    every trial."""

    name: str
    method: str
    metric: str
    maximize: bool
    parameters: dict[str, SweepParameter]
    arguments: dict[str, str]
    environment: dict[str, str]
    run_cap: int | None = None


@dataclass(frozen=True)
class TrialResult:
    """A trial's swept values, and the metric at its end with its standard error. failed: the error
    if it failed."""

    values: dict[str, str]
    score: float = math.nan
    error: float = math.nan
    failed: str = ""


# ---- the file ----


def read_sweep(path: Path, method: str | None = None) -> SweepFile:
    """Read a sweep file; `method` replaces the file's. Raises UserError: not a sweep file, or one
    that needs W&B's service."""
    where = path.name
    content = convert(parse_yaml(read_text(path), where), JsonObject, "content", where)
    _check_keys(content, KEYS, where)
    method = str(method or content.get("method"))
    if method not in ("grid", "random"):
        raise UserError(f"{where}: method={short(method)} {USE_AGENT}; it runs grid and random")
    metric = convert(content.get("metric", METRIC), dict[str, str], "metric", where)
    goal = metric.get("goal", "minimize")
    if "name" not in metric or goal not in ("minimize", "maximize"):
        raise UserError(f"{where}: metric needs a name and a goal, minimize or maximize")
    words = [str(word) for word in content.get("command") or [content.get("program")]]
    trains = [i for i, word in enumerate(words) if re.search(r"align[./]train(\.py)?$", word)]
    if not trains:
        example = '["python", "-m", "align.train", "recipe=block", "${args_no_hyphens}"]'
        raise UserError(f"{where}: command must run align.train, for example {example}")
    before, after = words[: trains[0]], words[trains[0] + 1 :]
    entries = _flatten(convert(content.get("parameters"), JsonObject, "parameters", where))
    return SweepFile(
        name=path.stem,
        method=method,
        metric=metric["name"],
        maximize=goal == "maximize",
        parameters={key: _read_parameter(entry, key, where) for key, entry in entries.items()},
        arguments=read_pairs([word for word in after if not word.startswith("${")]),
        environment=read_pairs([word for word in before if re.match(r"[A-Za-z_]\w*=", word)]),
        run_cap=convert(content.get("run_cap"), int | None, "run_cap", where),
    )


def read_pairs(words: list[str]) -> dict[str, str]:
    """`key=value` words as a mapping."""
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {key: value for key, _, value in pairs}


def _check_keys(content: JsonObject, known: Sequence[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise UserError(f"{where}: {short(key)} {USE_AGENT}{nearest(key, known)}")


def _read_parameter(entry: Any, key: str, where: str) -> SweepParameter:
    where = f"{where}: parameters.{key}"
    entry = convert(entry, JsonObject, "parameter", where)
    _check_keys(entry, PARAMETER_KEYS, where)
    values = convert(entry.get("values", []), list[Any], "values", where)
    if values or "value" in entry:
        return SweepParameter(tuple(values or [entry["value"]]))
    low, high = entry.get("min"), entry.get("max")
    is_whole = isinstance(low, int) and isinstance(high, int)
    kind = entry.get("distribution") or ("int_uniform" if is_whole else "uniform")
    if kind not in RANGES:
        raise UserError(f"{where}: distribution={short(kind)} {USE_AGENT}{_nearest_range(kind)}")
    lowest = 0 if kind.endswith("log_uniform_values") else -math.inf
    if not (finite(low) and finite(high) and lowest < low <= high):
        raise UserError(f"{where}: needs values, or a range of numbers from min to max")
    step = entry.get("q", 1)
    if not (finite(step) and step > 0):
        raise UserError(f"{where}: q={short(step)}: must be above 0")
    return SweepParameter((), kind, low, high, step)


def _nearest_range(kind: str) -> str:
    """A hint; `log_uniform` takes exponents in W&B, `log_uniform_values` the values themselves."""
    by_values = f"{kind}_values"
    return nearest(by_values if by_values in RANGES else kind, RANGES)


def _flatten(parameters: JsonObject, prefix: str = "") -> JsonObject:
    """Parameters by their whole names: `trainer: {parameters: {seed: …}}` is `trainer.seed`."""
    found: JsonObject = {}
    for key, entry in parameters.items():
        nested = entry.get("parameters") if isinstance(entry, dict) else None
        if isinstance(nested, dict):
            found |= _flatten(nested, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = entry
    return found


def list_trials(sweep: SweepFile, count: int | None, seed: int) -> list[dict[str, str]]:
    """The recipe arguments of each trial: the grid, or `count` draws (default: run_cap, or 10).
    Raises UserError: a grid over a range."""
    count = sweep.run_cap if count is None else count
    if count is not None and not 1 <= count <= MAX_TRIALS:
        limits = f"(--count, run_cap): must be 1 to {MAX_TRIALS}"
        raise UserError(f"{sweep.name}: {count} trials {limits}")
    trials: list[JsonObject] = []
    if sweep.method == "grid":
        ranges = [key for key, parameter in sweep.parameters.items() if not parameter.values]
        if ranges:
            hint = "--method random draws from a range"
            raise UserError(f"{sweep.name}: a grid needs values for {ranges[0]}; {hint}")
        grid = product(*(parameter.values for parameter in sweep.parameters.values()))
        trials = [dict(zip(sweep.parameters, row, strict=True)) for row in islice(grid, count)]
    else:
        for number in range(count or 10):
            items = sweep.parameters.items()
            trials.append({k: p.draw(random.Random(f"{seed} {number} {k}")) for k, p in items})
    return [{key: _format_value(value) for key, value in trial.items()} for trial in trials]


def _format_value(value: object) -> str:
    """A value as a recipe argument: text as it is, everything else as JSON, which is YAML."""
    return value if isinstance(value, str) else json.dumps(value)


# ---- trials ----


def run_sweep(
    sweep: SweepFile, trials: Sequence[dict[str, str]], folder: Path, fixed: dict[str, str]
) -> list[TrialResult]:
    """Run the trials that have not finished yet. `fixed`: recipe arguments of all of them. Raises
    UserError: arguments that no recipe takes, before anything runs. KeyboardInterrupt: a trial was
    interrupted."""
    given = {*fixed, *(sweep.arguments.keys() - {"output"})}
    for key in sorted({"output", *sweep.parameters} & given):
        differs = "differs between trials, so it can't be given for all of them"
        raise UserError(f"sweep {sweep.name}: {key} {differs}")
    arguments = [build_arguments(sweep, values, folder, fixed) for values in trials]
    return [_run_trial(sweep, *pair) for pair in zip(trials, arguments, strict=True)]


def build_arguments(
    sweep: SweepFile, values: dict[str, str], folder: Path, fixed: dict[str, str]
) -> dict[str, str]:
    """A trial's recipe arguments: those that an agent would pass, its output folder, named by a
    hash of the arguments so that a rerun finds it, and the folder of its text; never the logger
    wandb."""
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
    return TrialResult(
        values, float(last[sweep.metric]), float(last.get(f"{sweep.metric}_se", "nan"))
    )


def _train(arguments: dict[str, str], variables: dict[str, str], output: Path) -> str:
    """Run `align.train`; returns the last line of its log if it failed."""
    output.mkdir(parents=True, exist_ok=True)
    log = output / "log.txt"
    check_ordinary(log)
    # an agent's variables would send all trials into its own W&B run
    inherited = {name: value for name, value in os.environ.items() if name not in TRIAL_VARIABLES}
    command = [sys.executable, "-m", "align.train", *_join(arguments)]
    env = inherited | variables
    with log.open("ab") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env=env, check=False).returncode
    if code == 130 or code < 0:
        raise KeyboardInterrupt
    if code == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {code}"


def render_table(sweep: SweepFile, results: Sequence[TrialResult]) -> str:
    """Markdown: the score of each combination with a 95% interval, over its seeds or of its only
    run, the best first."""
    keys = [key for key in sweep.parameters if key != "seed"]
    groups: dict[tuple[str, ...], list[TrialResult]] = defaultdict(list)
    for result in {tuple(result.values.items()): result for result in results}.values():
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
