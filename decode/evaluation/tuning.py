"""`decode.eval --tune`: the best options of every system, found by a race on prompts that are not
measured afterwards.

In each round plain decoding and every candidate still in the race decode one prompt. A candidate
leaves when the paired 99% interval of its speed lies below its system's fastest one. The records
alone decide who is left, so an interrupted race resumes as it would have continued.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from time import monotonic

from decode.engine.decoder import Decoder
from decode.evaluation.config import TUNING_SUITE, EvalConfig
from decode.evaluation.plan import EvalPlan, make_decoders
from decode.evaluation.records import Record
from decode.evaluation.render import make_report
from decode.evaluation.runner import Task, warm_up
from decode.evaluation.session import Measurement, begin
from decode.evaluation.statistics import FEWEST, PromptKey, paired_ratio, times
from decode.evaluation.summary import BUG
from decode.systems.parsing import Method, Sweep, sweep_methods
from decode.systems.registry import PLAIN, option_name
from specalign.common.errors import UserError
from specalign.common.terminal import PlainConsole
from specalign.common.text import clock, plural
from specalign.suites.registry import prompts_of

LEVEL = 0.99
"""The level of the interval that has to lie below the fastest candidate's speed."""


def list_candidates(
    methods: Sequence[Method], sweep: Sweep, fixed: Container[str] = ()
) -> dict[str, list[Method]]:
    """Method as it was asked for → its candidates: every combination of values of the options that
    it leaves open. Values come from `sweep`, else from the system's own grid, except for the
    `fixed` options.

    Raises:
        UserError: a swept option that no method has.
    """
    sweep.check(methods)
    found = {}
    for method in methods:
        values: dict[str, tuple[str, Sequence[str]]] = {}  # option → its spelling and values
        for key, numbers in method.system.grid.items():
            if option_name(key) not in fixed:
                values[option_name(key)] = (key, [str(number) for number in numbers])
        for key, texts in sweep.values.items():
            values[option_name(key)] = (key, texts)
        free = method.system.limits().keys() - method.given
        open_values = {key: texts for name, (key, texts) in values.items() if name in free}
        found[method.name] = sweep_methods([method], Sweep(values=open_values))
    return found


class OutputChanged(Exception):
    """A race ended because outputs changed beyond rounding; the message names the methods and the
    report."""


def tune(
    config: EvalConfig, plan: EvalPlan, console: PlainConsole, command: str
) -> tuple[EvalConfig, EvalPlan, dict[str, Decoder]]:
    """The config, plan and decoders of the measurement that follows, with every method's best
    options.

    Raises:
        UserError: no candidate of a method can decode here.
        OutputChanged: a candidate is not lossless.
    """
    fixed = ("draft_tokens",) if config.drafting.draft_tokens else ()
    candidates = list_candidates([*plan.methods.values()], config.sweep, fixed)
    racing = replace(
        plan, methods={method.name: method for group in candidates.values() for method in group}
    )
    decoders, refused = make_decoders(config, racing)
    groups = {
        name: [m.name for m in group if m.name in decoders] for name, group in candidates.items()
    }
    for name, group in candidates.items():
        if not groups[name]:
            raise refused[group[0].name]
    if refused:
        console.say(f"not in the race (these options don't fit the drafters): {', '.join(refused)}")
    won = {name: group[0] for name, group in groups.items()}
    lines: list[str] = []
    contested = {name: group for name, group in groups.items() if len(group) > 1}
    if contested:
        names = [PLAIN, *(name for group in contested.values() for name in group)]
        measurement = _begin_race(
            config, racing, {name: decoders[name] for name in names}, console, command
        )
        with measurement.claim:
            won |= run_race(measurement, contested)
        where = f"{plural(len(measurement.tasks), 'prompt')} of {TUNING_SUITE}"
        lines = [
            f"{won[name]}, of {plural(len(group), 'setting')} on {where}"
            for name, group in contested.items()
        ]
    best = {won[name]: racing.methods[won[name]] for name in plan.methods}
    return (
        replace(config, sweep=Sweep(), tuned=lines),
        replace(plan, methods=best),
        {name: decoders[name] for name in best},
    )


def _begin_race(
    config: EvalConfig,
    plan: EvalPlan,
    decoders: dict[str, Decoder],
    console: PlainConsole,
    command: str,
) -> Measurement:
    config = replace(
        config,
        suite=TUNING_SUITE,
        prompts=None,
        prompts_column=None,
        data_dir=None,
        limit=config.tune,
        repeats=1,
        out=config.out and config.out / "tuning",
        no_hf_check=True,
        race=True,
    )
    suites, skipped = prompts_of(TUNING_SUITE, limit=config.limit)
    return begin(config, plan, decoders, suites, skipped, console, command)


def run_race(measurement: Measurement, groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Race the candidates of every group. Returns each group's fastest.

    Raises:
        UserError: no candidate of a group can decode here.
        OutputChanged: a candidate is not lossless.
    """
    console, report = measurement.console, measurement.folder / "report.html"
    groups = _able(measurement, groups)
    total = len(measurement.tasks)
    what = f"{plural(sum(map(len, groups.values())), 'setting')} of {plural(len(groups), 'method')}"
    console.say(f"tuning: {what} on {plural(total, 'prompt')}")
    seconds: list[float] = []

    def run(task: Task) -> list[Record]:
        started = monotonic()
        records = measurement.run_task(task)
        seconds.append(monotonic() - started)
        return records

    def finish_round(number: int, left: int) -> None:
        if seconds:
            rest = clock(sum(seconds) / len(seconds) * (total - number))
            console.say(f"round {number}/{total}: {left} settings left · {rest} left at most")
        changed = [
            r.method for r in measurement.records if r.divergence and r.divergence.kind == BUG
        ]
        if changed:
            make_report(measurement.folder)
            names = ", ".join(dict.fromkeys(changed))
            raise OutputChanged(f"OUTPUT CHANGED beyond rounding by {names}: {report}")

    won = race(groups, measurement.tasks, measurement.records, run, finish_round)
    make_report(measurement.folder)
    console.say(f"tuned: {', '.join(won.values())} ({report})")
    return won


def _able(measurement: Measurement, groups: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The candidates that can decode here, each warmed up; of a resumed race those that took part
    before.

    Raises:
        UserError: no candidate of a group can; the message is the first one's.
    """
    earlier = {record.method for record in measurement.records}
    if earlier:
        return {
            asked: [name for name in names if name in earlier] for asked, names in groups.items()
        }
    tokens = list(measurement.tasks[0].tokens)
    refused: dict[str, UserError] = {}
    for name, decoder in measurement.decoders.items():
        try:
            warm_up(
                {name: decoder}, tokens, measurement.settings, max(1, measurement.config.warmup)
            )
        except UserError as error:
            refused[name] = error
    able = {
        asked: [name for name in names if name not in refused] for asked, names in groups.items()
    }
    for asked, names in groups.items():
        if not able[asked]:
            raise refused[names[0]]
    if refused:
        measurement.console.say(
            f"not in the race (the target or the options don't allow it): {', '.join(refused)}"
        )
    return able


def find_survivors(
    groups: Mapping[str, Sequence[str]], alive: Sequence[str], records: Sequence[Record]
) -> list[str]:
    """Those of `alive`, which ran in every round so far, that are not slower than their group's
    fastest beyond chance."""
    found = []
    for names in groups.values():
        seconds = {name: times(records, name) for name in names if name in alive}
        best = seconds[_fastest(seconds)] if seconds else {}
        found += [name for name, mine in seconds.items() if not _is_slower(mine, best)]
    return found


def _is_slower(mine: Mapping[PromptKey, float], best: Mapping[PromptKey, float]) -> bool:
    """Whether the interval of its relative speed lies below 1; never with few prompts."""
    if mine is best or len(mine.keys() & best.keys()) < FEWEST:
        return False
    ratio = paired_ratio(best, mine, level=LEVEL)
    return ratio is not None and ratio.hi is not None and ratio.hi < 1


def _fastest(seconds: Mapping[str, Mapping[PromptKey, float]]) -> str:
    """The candidate with the least mean of seconds per token over prompts."""

    def mean(name: str) -> float:
        values = seconds[name].values()
        return sum(values) / len(values) if values else float("inf")

    return min(seconds, key=mean)


def race(
    groups: Mapping[str, Sequence[str]],
    tasks: Sequence[Task],
    records: Sequence[Record],
    run: Callable[[Task], list[Record]],
    finish_round: Callable[[int, int], object] = lambda number, left: None,
) -> dict[str, str]:
    """Group → the candidate that won.

    Args:
        groups: method as it was asked for → its candidates.
        tasks: one per prompt, with all candidates and plain decoding.
        records: those of an interrupted race; rounds without records are run.
        run: runs a task and writes its records.
        finish_round: called after each round with its number and how many candidates are left.
    """
    known = {record.key: record for record in records}
    seen: list[Record] = []
    alive = [name for names in groups.values() for name in names]
    for number, task in enumerate(tasks, 1):
        order = sorted(method for method in task.order if method in alive or method == PLAIN)
        # shuffled, so that no two candidates are always neighbours
        random.Random(f"{task.suite} {task.prompt.id} {task.repeat}").shuffle(order)
        task = replace(task, order=tuple(order))
        keys = [(task.suite, task.prompt.id, method, task.repeat) for method in task.order]
        if all(key in known for key in keys):
            seen += [known[key] for key in keys]
        else:
            seen += run(task)
        alive = find_survivors(groups, alive, seen)
        finish_round(number, len(alive))
    return {
        asked: _fastest({name: times(seen, name) for name in names if name in alive})
        for asked, names in groups.items()
    }
