"""A sweep file in W&B's format, read for the local runner, and its trials."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError, nearest
from specalign.common.files import read_text
from specalign.common.schema import JsonObject, convert, finite
from specalign.common.strict_yaml import parse_yaml
from specalign.common.text import short

KEYS = (
    "method", "metric", "parameters", "command", "program", "run_cap", "name", "description", "project", "entity",
)  # fmt: skip
PARAMETER_KEYS = ("value", "values", "min", "max", "distribution")
RANGES = ("uniform", "int_uniform", "log_uniform_values")
MAX_TRIALS = 10_000
USE_AGENT = "is not supported by the local runner; use `wandb sweep` and `wandb agent`"


@dataclass(frozen=True)
class SweepParameter:
    """Values to try of a recipe key: listed ones, or a range from `low` to `high`."""

    values: tuple[Any, ...] = ()
    distribution: str = ""
    low: float = 0
    high: float = 0

    def draw(self, generator: random.Random) -> Any:
        if self.values:
            return generator.choice(self.values)
        if self.distribution == "int_uniform":
            return generator.randint(int(self.low), int(self.high))
        if self.distribution == "uniform":
            return generator.uniform(self.low, self.high)
        return math.exp(generator.uniform(math.log(self.low), math.log(self.high)))


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


def read_sweep(path: Path, method: str | None = None) -> SweepFile:
    """Read a sweep file; `method` replaces the file's.

    Raises:
        UserError: not a sweep file, or one that needs W&B's service.
    """
    where = path.name
    content = convert(parse_yaml(read_text(path), where), JsonObject, "content", where)
    _check_keys(content, KEYS, where)
    method = str(method or content.get("method"))
    if method not in ("grid", "random"):
        raise UserError(f"{where}: method={short(method)} {USE_AGENT}; it runs grid and random")
    metric = convert(content.get("metric"), dict[str, str], "metric", where)
    goal = metric.get("goal", "minimize")
    if "name" not in metric or goal not in ("minimize", "maximize"):
        raise UserError(f"{where}: metric needs a name and a goal, minimize or maximize")
    words = [str(word) for word in content.get("command") or [content.get("program")]]
    trains = [i for i, word in enumerate(words) if re.search(r"align[./]train(\.py)?$", word)]
    if not trains:
        example = '["python", "-m", "align.train", "recipe=block", "${args_no_hyphens}"]'
        raise UserError(f"{where}: command must run align.train, for example {example}")
    before, after = words[: trains[0]], words[trains[0] + 1 :]
    entries = convert(content.get("parameters"), JsonObject, "parameters", where)
    parameters = {key: _read_parameter(entry, key, where) for key, entry in entries.items()}
    return SweepFile(
        name=path.stem,
        method=method,
        metric=metric["name"],
        maximize=goal == "maximize",
        parameters=parameters,
        arguments=read_pairs([word for word in after if not word.startswith("${")]),
        environment=read_pairs([word for word in before if re.match(r"[A-Za-z_]\w*=", word)]),
        run_cap=convert(content.get("run_cap"), int | None, "run_cap", where),
    )


def read_pairs(words: list[str]) -> dict[str, str]:
    """`key=value` words as a mapping."""
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {key: value for key, _, value in pairs}


def _check_keys(content: JsonObject, known: tuple[str, ...], where: str) -> None:
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
        raise UserError(f"{where}: distribution={short(kind)} {USE_AGENT}{nearest(kind, RANGES)}")
    lowest = 0 if kind == "log_uniform_values" else -math.inf
    if not (finite(low) and finite(high) and lowest < low <= high):
        raise UserError(f"{where}: needs values, or a range of numbers from min to max")
    return SweepParameter((), kind, low, high)


def list_trials(sweep: SweepFile, count: int | None, seed: int) -> list[dict[str, str]]:
    """The recipe arguments of each trial: the grid, or `count` draws (default: run_cap, or 10).

    Raises:
        UserError: a grid over a range.
    """
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


def _format_value(value: Any) -> str:
    """A value as a recipe argument: text as it is, everything else as JSON, which is YAML."""
    return value if isinstance(value, str) else json.dumps(value)
