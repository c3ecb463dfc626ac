"""The file of a sweep: W&B's own format, read strictly. What a W&B agent would run is what runs here.

W&B's own `sweeps` package can't read it: it needs numpy below 2, scipy and scikit-learn.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.common.errors import UserError, nearest
from align.common.files import read_text
from align.common.schema import finite
from align.common.strict_yaml import parse_yaml
from align.common.text import short

METHODS = ("grid", "random")
NESTED = "/"
"""Between the names of nested parameters; W&B allows it in no name."""
_LARGEST = 1e100
"""The largest number of a range."""
MACROS = tuple(
    f"${{{name}}}"
    for name in (
        "args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json", "args_json_file",
        "args_append_hydra", "args_override_hydra",
    )
)  # fmt: skip
"""Where a command takes the trial's parameters."""
_KEYS = (
    "method", "metric", "parameters", "command", "name", "description", "project", "entity", "program", "run_cap",
    "apiVersion", "kind", "controller",
)  # fmt: skip
_METRIC_KEYS = ("name", "goal", "impute", "impute_while_running")
_SERVICE = {
    "early_terminate": "trials run in full here; only W&B's service stops them early",
    "metrics": "one metric is compared here",
    "scheduler": "it needs W&B's service",
    "job": "W&B Launch runs it; give a command",
    "image_uri": "W&B Launch runs it; give a command",
    "bayes": "it needs W&B's service; --method random runs here",
    "custom": "it needs W&B's service; --method random runs here",
    "target": "only W&B's service ends a sweep at a value",
}
"""What W&B's format has and this runner has not, with the reason."""
_RANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("uniform", "int_uniform", "q_uniform"), {"min": None, "max": None}),
    **dict.fromkeys(("log_uniform_values", "q_log_uniform_values"), {"min": None, "max": None}),
    "inv_log_uniform_values": {"min": None, "max": None},
    **dict.fromkeys(("normal", "q_normal", "log_normal", "q_log_normal"), {"mu": 0.0, "sigma": 1.0}),
    **dict.fromkeys(("beta", "q_beta"), {"a": 1.0, "b": 1.0}),
}
"""Distributions over numbers, with the names of their two numbers and W&B's defaults."""
_EXPONENTS = ("log_uniform", "q_log_uniform", "inv_log_uniform")
"""Distributions that W&B has replaced: their limits are exponents of e."""
_LISTS = {"constant": ("value",), "categorical": ("values",), "categorical_w_probabilities": ("values", "probabilities")}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One swept key; the names of nested parameters are joined by `NESTED`.

    Attributes:
        values: of a list, with their `weights` where the file has probabilities.
        low, high: the two numbers of another distribution (min and max, mu and sigma, a and b).
        step: its q; where that is an integer, so are the draws.
    """

    name: str
    values: tuple[Any, ...] = ()
    weights: tuple[float, ...] = ()
    distribution: str = "categorical"
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0


@dataclass(frozen=True)
class Sweep:
    """A sweep's file.

    Attributes:
        words, later: arguments of every trial's `align.train`, before and after its parameters.
        environment: NAME=value, as the command sets them.
    """

    name: str
    method: str
    metric: str
    maximise: bool
    parameters: tuple[Parameter, ...]
    words: tuple[str, ...]
    later: tuple[str, ...]
    cap: int | None = None
    environment: tuple[str, ...] = ()


def read_sweep(path: Path, method: str | None = None) -> Sweep:
    """Read a sweep's file.

    Args:
        method: stands for the file's.

    Raises:
        UserError: what is not W&B's format, or can't run here; the line names file and key.
    """
    where = path.name
    content = parse_yaml(read_text(path), where)
    if not isinstance(content, dict):
        raise UserError(f"{where}: must hold `key: value` lines, as W&B's sweeps do")
    _check_keys(content, _KEYS, where)
    method = method or content.get("method")
    if str(method) in _SERVICE:
        raise UserError(
            f"{where}: method={method} is not supported by the local runner, which runs {' and '.join(METHODS)}: "
            f"{_SERVICE[str(method)]}"
        )
    if method not in METHODS:
        raise UserError(f"{where}: method={short(method)} is unknown{nearest(str(method), METHODS)}")
    metric = content.get("metric") or {}
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        raise UserError(f"{where}: metric must have a name, validation/tau_sampling for instance")
    _check_keys(metric, _METRIC_KEYS, f"{where}: metric")
    goal = metric.get("goal", "minimize")
    if goal not in ("maximize", "minimize"):
        raise UserError(f"{where}: metric.goal={short(goal)}{nearest(str(goal), ('maximize', 'minimize'))}")
    environment, before, after = _read_command(content, where)
    cap = content.get("run_cap")
    if cap is not None and (type(cap) is not int or cap < 1):
        raise UserError(f"{where}: run_cap={short(cap)} must be a whole number, at least 1")
    parameters = tuple(_read_parameters(content.get("parameters"), "", f"{where}: parameters"))
    return Sweep(
        path.stem, method, metric["name"], goal == "maximize", parameters, before, after, cap, environment
    )


def _check_keys(content: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := next((str(key) for key in content if key not in known), None):
        if unknown in _SERVICE:
            raise UserError(f"{where}: {unknown} is not supported by the local runner: {_SERVICE[unknown]}")
        raise UserError(f"{where}: unknown key {short(unknown)}{nearest(unknown, known)}")


def _read_parameters(entries: Any, prefix: str, where: str) -> list[Parameter]:
    """Read `parameters`, and those that are nested in them."""
    if not isinstance(entries, dict) or not entries:
        raise UserError(f"{where} must name at least one key of a recipe")
    found = []
    for name, entry in entries.items():
        if isinstance(entry, dict) and [*entry] == ["parameters"]:
            inner = f"{where}.{name}.parameters"
            found += _read_parameters(entry["parameters"], f"{prefix}{name}{NESTED}", inner)
        else:
            found.append(_read_parameter(f"{prefix}{name}", entry, f"{where}.{name}"))
    return found


def _read_parameter(name: str, entry: Any, what: str) -> Parameter:
    if not isinstance(entry, dict):
        raise UserError(f"{what} must be {{values: […]}} or a distribution")
    kind = _distribution(entry, what)
    keys = _LISTS.get(kind) or (*_RANGES[kind], *(["q"] if kind.startswith("q_") else []))
    _check_keys(entry, (*keys, "distribution"), what)
    if kind not in _LISTS:
        return _read_range(name, kind, entry, what)
    if kind == "constant":
        return Parameter(name, (entry.get("value"),))
    values, weights = entry.get("values"), entry.get("probabilities", [])
    if not isinstance(values, list) or not values:
        raise UserError(f"{what}.values must be a list that is not empty")
    if kind != "categorical" and (
        not isinstance(weights, list)
        or len(weights) != len(values)
        or not all(_is_number(w) and w >= 0 for w in weights)
        or sum(weights) <= 0
    ):
        raise UserError(
            f"{what}.probabilities must be a number of at least 0 for each of the {len(values)} values"
        )
    return Parameter(name, tuple(values), tuple(float(w) for w in weights))


def _distribution(entry: dict[str, Any], what: str) -> str:
    """The parameter's distribution; without a name W&B's choice: by its keys, and over integers where both ends are."""
    kind = entry.get("distribution")
    known = (*_LISTS, *_RANGES)
    if kind in _EXPONENTS:
        raise UserError(
            f"{what}.distribution={kind}: its min and max are exponents of e, and W&B has replaced it: "
            f"{kind}_values takes the limits themselves"
        )
    if kind is not None:
        if kind not in known:
            raise UserError(f"{what}.distribution={short(kind)} is unknown{nearest(str(kind), known)}")
        return str(kind)
    if "value" in entry:
        return "constant"
    if "values" in entry:
        return "categorical_w_probabilities" if "probabilities" in entry else "categorical"
    if "min" not in entry and "max" not in entry:
        keys = (
            "value",
            "values",
            "parameters",
            "distribution",
            "min",
            "max",
            "probabilities",
            "mu",
            "sigma",
            "a",
            "b",
            "q",
        )
        _check_keys(entry, keys, what)
        raise UserError(f"{what}: needs value, values, min and max, or a distribution")
    whole = type(entry.get("min")) is int and type(entry.get("max")) is int
    return "int_uniform" if whole else "uniform"


def _read_range(name: str, kind: str, entry: dict[str, Any], what: str) -> Parameter:
    numbers = {**_RANGES[kind], **entry}
    first, second = _RANGES[kind]
    low, high = numbers[first], numbers[second]
    if not _is_number(low) or not _is_number(high):
        raise UserError(f"{what}: {kind} needs numbers for {first} and {second}")
    fits = {"min": low <= high, "mu": high >= 0, "a": low > 0 and high > 0}[first]
    if not fits or ("log_uniform" in kind and low <= 0):
        raise UserError(f"{what}: {first}={low} and {second}={high} make no range")
    if kind == "int_uniform" and not (float(low).is_integer() and float(high).is_integer()):
        raise UserError(f"{what}: int_uniform needs whole numbers for min and max")
    step = entry.get("q", 1.0)
    if not _is_number(step) or step < 1 / _LARGEST:
        raise UserError(f"{what}.q={short(step)} must be above 0")
    return Parameter(name, (), (), kind, low, high, step)


def _is_number(value: Any) -> bool:
    """Whether draws can be computed with it."""
    return finite(value) and abs(value) <= _LARGEST


def _read_command(
    content: dict[str, Any], where: str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Read a command that runs `align.train`: its variables, the arguments before and those after the parameters."""
    command = content.get("command", ["${env}", "${interpreter}", "${program}", "${args}"])
    program = str(content.get("program"))
    words = [_fill_in(str(word), program) for word in command] if isinstance(command, list) else []
    is_ours = [word == "align.train" or word.endswith("align/train.py") for word in words]
    if True not in is_ours:
        raise UserError(
            f"{where}: command must be a list that runs align.train, "
            'for instance ["python", "-m", "align.train", "recipe=block", "${args_no_hyphens}"]'
        )
    start = is_ours.index(True)
    variables = tuple(word for word in words[:start] if re.match(r"[A-Za-z_]\w*=", word))
    words = words[start + 1 :]
    places = [i for i, word in enumerate(words) if word in MACROS]
    if len(places) != 1:
        raise UserError(f"{where}: command must hold one of {', '.join(MACROS)}, where the parameters go")
    stray = next((w for i, w in enumerate(words) if w.startswith("${") and i != places[0]), None)
    if stray:
        raise UserError(f"{where}: command: {stray} is unknown{nearest(stray, MACROS)}")
    return variables, tuple(words[: places[0]]), tuple(words[places[0] + 1 :])


def _fill_in(word: str, program: str) -> str:
    """Replace `${program}`, and `${envvar:NAME}` as W&B does: by NAME itself where there is no such variable."""
    if word == "${program}" and program != "None":
        return program
    return re.sub(r"\$\{envvar:([A-Z0-9_]*)\}", lambda found: os.environ.get(found[1], found[1]), word)
