"""`python -m align.sweep FILE.yaml [key=value …]`: run a W&B sweep file on this machine, without an
account.

Runs the grid, or random trials (--method random --count N), each in its own folder. Rerun the
command to resume: finished trials are skipped, failed ones run again. The table lists the trials,
the best first.
"""

import csv
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

from align.config.arguments import read_arguments
from align.config.parser import load_recipe
from align.config.wandb_runs import TRIAL_VARIABLES, text_folder_name
from specalign.common.checksums import hash_json
from specalign.common.claims import Claim
from specalign.common.commands import OptionParser, path
from specalign.common.errors import UserError, cli, nearest
from specalign.common.files import expand_path, read_text, write_json, write_text
from specalign.common.schema import JsonObject, convert, finite
from specalign.common.strict_yaml import parse_yaml
from specalign.common.text import markdown_table, say, short

SHIPPED = Path(__file__).resolve().parents[1] / "recipes" / "sweeps"
KEYS = (
    "method", "metric", "program", "parameters", "command", "name", "description", "project", "entity",
)  # fmt: skip
PARAMETER_KEYS = ("value", "values", "min", "max", "distribution")
RANGES = ("uniform", "int_uniform", "log_uniform_values")
USE_AGENT = "is not supported by the local runner; use `wandb sweep` and `wandb agent`"
FINISHED = "finished.json"
Values = dict[str, str]  # arguments by recipe key
Choices = list[str] | Callable[[random.Random], float]
"""Listed values, or what draws one from a range."""


@dataclass(frozen=True)
class SweepFile:
    """A sweep file. parameters: by recipe key. arguments, environment: of its command."""

    method: str
    metric: str
    maximize: bool
    parameters: dict[str, Choices]
    arguments: Values
    environment: Values


def read_sweep(file: Path, method: str | None = None) -> SweepFile:
    """Read a sweep file; `method` replaces the file's. Raises UserError: not a sweep file, or one
    that needs W&B's service."""
    where = file.name
    content = convert(parse_yaml(read_text(file), where), JsonObject, "content", where)
    _check_known(content, KEYS, where)
    method = method or content.get("method")
    _check_known([method], ("grid", "random"), f"{where}: method")
    metric = convert(content.get("metric", {}), dict[str, str], "metric", where)
    goal = metric.get("goal", "minimize")
    _check_known([goal], ("minimize", "maximize"), f"{where}: metric.goal")
    parameters = convert(content.get("parameters"), JsonObject, "parameters", where)
    words = convert(content.get("command"), list[str], "command", where)
    if "align.train" not in words:
        example = '["python", "-m", "align.train", "recipe=block", "${args_no_hyphens}"]'
        raise UserError(f"{where}: command must run align.train, for example {example}")
    start = words.index("align.train")
    return SweepFile(
        method=str(method),
        metric=metric.get("name", "validation/loss"),
        maximize=goal == "maximize",
        parameters=_flatten(parameters, "", where),
        arguments=read_arguments([w for w in words[start + 1 :] if not w.startswith("${")], []),
        environment=read_arguments([word for word in words[:start] if "=" in word], []),
    )


def _check_known(names: Iterable[object], known: Sequence[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{where}: {short(name)} {USE_AGENT}{nearest(str(name), known)}")


def _flatten(parameters: JsonObject, prefix: str, where: str) -> dict[str, Choices]:
    """Parameters by their whole names: `trainer: {parameters: {seed: …}}` is `trainer.seed`."""
    found: dict[str, Choices] = {}
    for name, value in parameters.items():
        key = prefix + name
        entry = convert(value, JsonObject, f"parameters.{key}", where)
        if isinstance(entry.get("parameters"), dict):
            found |= _flatten(entry["parameters"], f"{key}.", where)
        else:
            found[key] = _read_parameter(entry, f"{where}: parameters.{key}")
    return found


def _read_parameter(entry: JsonObject, where: str) -> Choices:
    _check_known(entry, PARAMETER_KEYS, where)
    values = [entry["value"]] if "value" in entry else entry.get("values", [])
    if isinstance(values, list) and values:
        # text as it is, everything else as JSON, which is YAML
        return [value if isinstance(value, str) else json.dumps(value) for value in values]
    low, high = entry.get("min", math.nan), entry.get("max", math.nan)
    is_whole = type(low) is type(high) is int
    kind = entry.get("distribution", "int_uniform" if is_whole else "uniform")
    _check_known([kind], RANGES, f"{where}.distribution")
    lowest = 0 if kind == "log_uniform_values" else -math.inf
    if not (finite(low) and finite(high) and lowest < low <= high):
        raise UserError(f"{where}: needs values, or a range of numbers from min to max")
    if kind == "int_uniform":
        return lambda generator: generator.randint(int(low), int(high))
    if kind == "uniform":
        return lambda generator: generator.uniform(low, high)
    return lambda generator: math.exp(generator.uniform(math.log(low), math.log(high)))


def list_trials(sweep: SweepFile, count: int | None) -> list[Values]:
    """The swept arguments of each trial: the first `count` of the grid, or `count` draws (default
    10). Raises UserError: a grid over a range."""
    parameters = sweep.parameters
    if sweep.method == "random":
        numbers = range(count or 10)
        return [{k: _draw(v, f"0 {n} {k}") for k, v in parameters.items()} for n in numbers]
    listed = {key: values for key, values in parameters.items() if isinstance(values, list)}
    for key in parameters.keys() - listed.keys():
        raise UserError(f"a grid needs values for {key}; --method random draws from ranges")
    return [dict(zip(listed, row, strict=True)) for row in islice(product(*listed.values()), count)]


def _draw(choices: Choices, seed: str) -> str:
    generator = random.Random(seed)
    if isinstance(choices, list):
        return generator.choice(choices)
    return json.dumps(choices(generator))


def build_arguments(sweep: SweepFile, values: Values, folder: Path, fixed: Values) -> Values:
    """A trial's recipe arguments: those that an agent would pass, its output folder, named by a
    hash of the arguments so that a rerun finds it, the folder of its text, and metrics.csv as its
    logger. Raises UserError: arguments that no recipe takes."""
    given = {**sweep.arguments, "trainer.logger": "csv", **values, **fixed}
    given["trainer.resume"] = "auto"
    given.pop("output", None)
    recipe = load_recipe(_join(given))
    if recipe.data.path is None:
        given["data.path"] = str(folder / text_folder_name(recipe, given))
    return given | {"output": str(folder / "trials" / hash_json(given)[:12])}


def _join(arguments: Values) -> list[str]:
    return [f"{key}={value}" for key, value in arguments.items()]


def run_trial(sweep: SweepFile, arguments: Values) -> Values:
    """Run a trial unless it has finished. Returns its last row of metrics.csv with the metric; {}
    if it failed. Raises UserError: the metric was not logged; KeyboardInterrupt: the trial was
    interrupted."""
    output = Path(arguments["output"])
    if not (output / FINISHED).is_file():
        say(f"trial {output}", error=True)
        output.mkdir(parents=True, exist_ok=True)
        # an agent's variables would send all trials into its own W&B run
        env = {name: value for name, value in os.environ.items() if name not in TRIAL_VARIABLES}
        env |= sweep.environment
        command = [sys.executable, "-m", "align.train", *_join(arguments)]
        with (output / "log.txt").open("ab") as log:
            code = subprocess.run(command, stdout=log, stderr=log, env=env, check=False).returncode
        if code == 130 or code < 0:
            raise KeyboardInterrupt
        if code:
            return {}
        write_json(output / FINISHED, arguments)
    rows = csv.DictReader(read_text(output / "metrics.csv").splitlines())
    measured = [row for row in rows if row.get(sweep.metric)]
    if not measured:
        raise UserError(f"metric {sweep.metric!r} was not logged in {output}/metrics.csv")
    return measured[-1]


def render_table(sweep: SweepFile, trials: Sequence[Values], rows: Sequence[Values]) -> str:
    """Markdown: each trial's metric with its 95% interval, the best first."""
    lines = []
    for values, row in zip(trials, rows, strict=True):
        score = float(row.get(sweep.metric, "nan"))
        width = 1.96 * float(row.get(f"{sweep.metric}_se") or "nan")
        interval = f" [{score - width:.4f}, {score + width:.4f}]" if math.isfinite(width) else ""
        rank = -score if sweep.maximize else score
        text = f"{score:.4f}{interval}" if row else "failed"
        lines.append((rank if math.isfinite(rank) else math.inf, [*values.values(), text]))
    lines.sort(key=lambda line: line[0])
    return markdown_table([*sweep.parameters, f"{sweep.metric} [95%]"], [c for _, c in lines])


def parser() -> OptionParser:
    p = OptionParser(
        prog="python -m align.sweep",
        description="Run a W&B sweep file on this machine, without an account.",
    )
    names = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
    count = "number of trials (default: the whole grid, or 10 random ones)"
    add = p.add_argument
    add("sweep", metavar="FILE", help=f"a sweep's .yaml file, or a shipped sweep: {names}")
    add("words", nargs="*", metavar="key=value", help="recipe keys for all trials")
    add("--method", choices=("grid", "random"), help="search method (default: the file's)")
    add("--count", type=int, metavar="N", help=count)
    add("--out", type=path, metavar="DIR", help="output folder (default runs/sweeps/NAME)")
    return p


@cli
def main(argv: list[str] | None = None) -> None:
    options = parser().parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    if options.count is not None and options.count < 1:
        raise UserError(f"--count {options.count}: must be at least 1")
    file = expand_path(options.sweep)
    if not file.is_file():
        file = SHIPPED / f"{options.sweep}.yaml"
    if not file.is_file():
        shipped = [place.stem for place in SHIPPED.glob("*.yaml")]
        raise UserError(f"sweep {options.sweep!r}: no such file{nearest(file.stem, shipped)}")
    sweep = read_sweep(file, options.method)
    trials = list_trials(sweep, options.count)
    fixed = read_arguments(options.words, [])
    for key in sorted({"output", *sweep.parameters} & fixed.keys()):
        raise UserError(f"{key} differs between trials, so it can't be given for all of them")
    folder = options.out or Path("runs") / "sweeps" / file.stem
    arguments = [build_arguments(sweep, values, folder, fixed) for values in trials]
    with Claim(folder, "--out"):
        rows = [run_trial(sweep, of_trial) for of_trial in arguments]
        page = render_table(sweep, trials, rows)
        write_text(folder / "sweep.md", page + "\n")
    say(f"{page}\n\n{folder / 'sweep.md'}")
    failed = [of_trial["output"] for of_trial, row in zip(arguments, rows, strict=True) if not row]
    if failed:
        say(f"failed, see log.txt in {', '.join(failed)}; rerun the command to retry", error=True)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
