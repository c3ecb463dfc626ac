"""A sweep's file: W&B's own format, read strictly. What a W&B agent would run is what runs here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.common.errors import UserError, nearest
from align.common.schema import finite
from align.common.strict_yaml import parse_yaml
from align.common.tables import read_text
from align.common.text import short

METHODS = ("grid", "random")
_MOST = 1e100
"""The largest number of a range."""
MACROS = ("${args}", "${args_no_hyphens}", "${args_no_equals}")
"""Where a command takes the trial's parameters."""
_KEYS = (
    "method",
    "metric",
    "parameters",
    "command",
    "name",
    "description",
    "project",
    "entity",
    "program",
    "run_cap",
)
_OF_PARAMETER = ("value", "values", "probabilities", "distribution", "min", "max", "mu", "sigma", "q")
DISTRIBUTIONS = (
    "constant", "categorical", "uniform", "int_uniform", "q_uniform", "log_uniform_values", "q_log_uniform_values", "normal", "q_normal",
)  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One swept key. values: what a grid goes through, or draws come from (`weights`); else a distribution over numbers."""

    name: str
    values: tuple[Any, ...] = ()
    weights: tuple[float, ...] = ()
    distribution: str = "categorical"
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0


@dataclass(frozen=True)
class Sweep:
    """words: what every trial's `align.train` is given, before and after (`later`) its parameters."""

    name: str
    method: str
    metric: str
    maximise: bool
    parameters: tuple[Parameter, ...]
    words: tuple[str, ...]
    later: tuple[str, ...]
    cap: int | None = None


def read_sweep(path: Path) -> Sweep:
    """The sweep in a file.

    Raises:
        UserError: what is not W&B's format, or can't run here; the line names file and key.
    """
    where = path.name
    content = parse_yaml(read_text(path), where)
    if not isinstance(content, dict):
        raise UserError(f"{where}: must hold `key: value` lines, as W&B's sweeps do")
    for key in content:
        if key not in _KEYS:
            hint = (
                "; --halving stops trials early here"
                if key == "early_terminate"
                else nearest(str(key), _KEYS)
            )
            raise UserError(f"{where}: unknown key {short(str(key))}{hint}")
    method = content.get("method")
    if method not in METHODS:
        hint = (
            " (it needs W&B's service; --method random runs here)"
            if method == "bayes"
            else nearest(str(method), METHODS)
        )
        raise UserError(f"{where}: method={short(method)} is unknown{hint}")
    metric = content.get("metric") or {}
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        raise UserError(f"{where}: metric must have a name, validation/tau_sampling for instance")
    goal = metric.get("goal", "minimize")
    if goal not in ("maximize", "minimize"):
        raise UserError(f"{where}: metric.goal={short(goal)}{nearest(str(goal), ('maximize', 'minimize'))}")
    parameters = content.get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        raise UserError(f"{where}: parameters must name at least one key of a recipe")
    before, after = _command(content.get("command"), where)
    cap = content.get("run_cap")
    if cap is not None and (type(cap) is not int or cap < 1):
        raise UserError(f"{where}: run_cap={short(cap)} must be a whole number, at least 1")
    read = tuple(_parameter(str(name), entry, where) for name, entry in parameters.items())
    return Sweep(path.stem, method, metric["name"], goal == "maximize", read, before, after, cap)


def _parameter(name: str, entry: Any, where: str) -> Parameter:
    what = f"{where}: parameters.{name}"
    if not isinstance(entry, dict):
        raise UserError(f"{what} must be {{values: […]}} or a distribution")
    if unknown := next((key for key in entry if key not in _OF_PARAMETER), None):
        raise UserError(f"{what}: unknown key {short(str(unknown))}{nearest(str(unknown), _OF_PARAMETER)}")
    if "value" in entry:
        return Parameter(name, (entry["value"],))
    if "values" in entry:
        values, weights = entry["values"], entry.get("probabilities") or []
        if not isinstance(values, list) or not values:
            raise UserError(f"{what}.values must be a list that is not empty")
        if weights and (
            not isinstance(weights, list)
            or len(weights) != len(values)
            or not all(_number(w) and w >= 0 for w in weights)
            or sum(weights) <= 0
        ):
            raise UserError(
                f"{what}.probabilities must be a number of at least 0 for each of the {len(values)} values"
            )
        return Parameter(name, tuple(values), tuple(float(w) for w in weights))
    return _distribution(name, entry, what)


def _distribution(name: str, entry: dict[str, Any], what: str) -> Parameter:
    """A range: uniform where no distribution is named, over whole numbers where both ends are."""
    given = entry.get("distribution")
    normal = given in ("normal", "q_normal")
    ends = ("mu", "sigma") if normal else ("min", "max")
    lacking = next((end for end in ends if not _number(entry.get(end))), None)
    if lacking:
        raise UserError(f"{what}: needs value, values, or numbers for {ends[0]} and {ends[1]}")
    low, high = entry[ends[0]], entry[ends[1]]
    whole = isinstance(low, int) and isinstance(high, int)
    kind = given or ("int_uniform" if whole else "uniform")
    if kind not in DISTRIBUTIONS[2:]:
        raise UserError(
            f"{what}.distribution={short(kind)} is unknown{nearest(str(kind), DISTRIBUTIONS[2:])}"
        )
    if (
        (not normal and high < low)
        or (kind.endswith("log_uniform_values") and low <= 0)
        or (normal and high < 0)
    ):
        raise UserError(f"{what}: {ends[0]}={low} and {ends[1]}={high} make no range")
    step = entry.get("q", 1)
    if not _number(step) or step < 1 / _MOST:
        raise UserError(f"{what}.q={short(step)} must be above 0")
    return Parameter(name, (), (), kind, float(low), float(high), float(step))


def _number(value: Any) -> bool:
    """Whether it is one with which draws can be computed."""
    return finite(value) and abs(value) <= _MOST


def _command(command: Any, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The recipe's words of a command that runs `align.train`, before and after the parameters."""
    if not isinstance(command, list) or "align.train" not in command:
        raise UserError(f"{where}: command must be a list that runs align.train, as the shipped sweeps' does")
    words = [str(word) for word in command[command.index("align.train") + 1 :]]
    places = [i for i, word in enumerate(words) if word in MACROS]
    if len(places) != 1:
        raise UserError(f"{where}: command must hold one of {', '.join(MACROS)}, where the parameters go")
    stray = next((w for i, w in enumerate(words) if w.startswith("${") and i != places[0]), None)
    if stray:
        raise UserError(f"{where}: command: {stray} is unknown{nearest(stray, MACROS)}")
    return tuple(words[: places[0]]), tuple(words[places[0] + 1 :])
