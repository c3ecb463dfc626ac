"""The best setting of every system: its settings race on prompts that are not measured afterwards (`decode.eval --tune`).

A round is one prompt, which plain decoding and every setting still in the race decode, in an order of its own. A setting
leaves when the paired 99% interval of its speed lies below that of its system's fastest setting. This is a rule of thumb and not a
test: the winner's figures are measured on other prompts. An output changed beyond rounding ends the race. The records alone
decide which settings are left, so a race that was stopped continues as it would have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from align.common.errors import UserError
from align.common.terminal import PlainConsole
from decode.benchmark.config import TUNING_SUITE, EvalConfig
from decode.benchmark.plan import Plan, decoders_of, forget
from decode.benchmark.progress import RaceProgress
from decode.benchmark.runner import Task, warm_up
from decode.benchmark.session import Measurement, begin
from decode.method_names import PLAIN
from decode.methods.spec import Method, swept
from decode.reporting.records import Record
from decode.reporting.render import make_report
from decode.reporting.statistics import FEWEST, PromptKey, paired_ratio, times
from decode.reporting.summary import BUG, plural
from decode.suites.registry import prompts_of

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder

LEVEL = 0.99
"""The level of the interval that has to lie below the fastest setting's speed."""


def settings_to_try(
    methods: Sequence[Method], sweep: Sequence[str], fixed: Container[str] = ()
) -> dict[str, list[Method]]:
    """Method as it was asked for → its settings: every combination of values for the options that it leaves open. The values come
    from `sweep` (`key=v1,v2`) or from the system's own grid. `fixed`: options that the grid does not change.

    Raises:
        UserError: a malformed word, or a key that no method has.
    """
    swept(methods, sweep)
    words = {word.partition("=")[0]: word for word in sweep}
    found = {}
    for method in methods:
        own = {word.partition("=")[0]: word for word in method.system.grid}
        each = {key: word for key, word in own.items() if key not in fixed} | words
        free = method.system.keys - {*method.given}
        found[method.name] = swept([method], [word for key, word in each.items() if key in free])
    return found


class OutputChanged(Exception):
    """A race ended because outputs changed beyond rounding; the message names the methods and the report."""


def tuned(
    config: EvalConfig, plan: Plan, console: PlainConsole, command: str
) -> tuple[EvalConfig, Plan, dict[str, Decoder]]:
    """The config, plan and decoders of the measurement that follows, with every method at its best setting.

    Raises:
        UserError: no setting of a method can decode here.
        OutputChanged: one of them is not lossless.
    """
    fixed = ("gamma",) if config.drafting.draft_tokens else ()
    trying = settings_to_try([*plan.methods.values()], config.sweep, fixed)
    racing = replace(plan, methods={m.name: m for made in trying.values() for m in made})
    decoders, refused = decoders_of(config, racing)
    groups = {name: [m.name for m in made if m.name in decoders] for name, made in trying.items()}
    for name, made in trying.items():
        if not groups[name]:
            raise refused[made[0].name]
    if refused:
        note = f"not in the race, as these drafters or options don't go together: {', '.join(refused)}"
        console.say(note)
    won, lines = {name: made[0] for name, made in groups.items()}, []
    if several := {name: made for name, made in groups.items() if len(made) > 1}:
        own = replace(
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
        here = {name: decoders[name] for name in (PLAIN, *(n for made in several.values() for n in made))}
        suites, skipped = prompts_of(own.suite, limit=own.limit)
        measurement = begin(own, racing, here, suites, skipped, console, command)
        with measurement.claim:
            won |= run_race(measurement, several)
        on = f"{plural(len(measurement.tasks), 'prompt')} of {TUNING_SUITE}"
        lines = [f"{won[name]}, of {plural(len(made), 'setting')} on {on}" for name, made in several.items()]
    best = {won[name]: racing.methods[won[name]] for name in plan.methods}
    for name in best:
        forget(decoders[name])
    return (
        replace(config, sweep=[], tuned=lines),
        replace(plan, methods=best),
        {name: decoders[name] for name in best},
    )


def run_race(measurement: Measurement, groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Run the settings of every group against each other. Returns the fastest one of each.

    Raises:
        UserError: no setting of a group can decode here.
        OutputChanged: one of them is not lossless.
    """
    groups = _able(measurement, groups)
    count, report = sum(map(len, groups.values())), measurement.folder / "report.html"
    what = f"{plural(count, 'setting')} of {plural(len(groups), 'method')}"
    measurement.console.say(f"tuning: {what} on {plural(len(measurement.tasks), 'prompt')}")
    progress = RaceProgress(measurement.console, len(measurement.tasks))

    def run(task: Task) -> list[Record]:
        progress.begin()
        return measurement.run_task(task)

    def ended(left: int) -> None:
        progress.done(left)
        if wrong := changed(measurement.records):
            make_report(measurement.folder)
            raise OutputChanged(f"OUTPUT CHANGED beyond rounding by {', '.join(wrong)}: {report}")

    won = race(groups, measurement.tasks, measurement.records, run, ended)
    make_report(measurement.folder)
    measurement.console.say(f"tuned: {', '.join(won.values())} ({report})")
    return won


def _able(measurement: Measurement, groups: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The settings that can decode here, each warmed up; the user is told the others. In a race that is continued: the settings
    that took part before.

    Raises:
        UserError: no setting of a group can; the line says why the first one can't.
    """
    here = {record.method for record in measurement.records}
    if here:
        return {asked: [name for name in names if name in here] for asked, names in groups.items()}
    tokens, why = list(measurement.tasks[0].tokens), dict[str, UserError]()
    for name, decoder in measurement.decoders.items():
        try:
            warm_up({name: decoder}, tokens, measurement.settings, max(1, measurement.config.warmup))
        except UserError as error:
            why[name] = error
    able = {asked: [name for name in names if name not in why] for asked, names in groups.items()}
    for asked, names in groups.items():
        if not able[asked]:
            raise why[names[0]]
    if why:
        measurement.console.say(
            f"not in the race, as the target or the settings don't allow it: {', '.join(why)}"
        )
    return able


def changed(records: Sequence[Record]) -> list[str]:
    """The methods that changed an output beyond rounding."""
    return list(dict.fromkeys(r.method for r in records if r.divergence and r.divergence.kind == BUG))


def survivors(
    groups: Mapping[str, Sequence[str]], alive: Sequence[str], records: Sequence[Record]
) -> list[str]:
    """Those of `alive`, which took part in every round so far, that are not slower than the fastest of their group by more than
    chance explains, in seconds per token over the same prompts.
    """
    found = []
    for names in groups.values():
        here = [name for name in names if name in alive]
        seconds = {name: times(records, name) for name in here}
        best = seconds[_fastest(seconds)] if here else {}
        found += [name for name in here if not _slower(seconds[name], best)]
    return found


def _slower(mine: Mapping[PromptKey, float], best: Mapping[PromptKey, float]) -> bool:
    """Whether the interval of its speed, relative to the fastest, lies below 1; never with few prompts."""
    if mine is best or len(mine.keys() & best.keys()) < FEWEST:
        return False
    ratio = paired_ratio(best, mine, level=LEVEL)
    return ratio is not None and ratio.hi is not None and ratio.hi < 1


def _fastest(seconds: Mapping[str, Mapping[PromptKey, float]]) -> str:
    """The setting with the least mean of seconds per token over prompts."""

    def mean(name: str) -> float:
        values = seconds[name].values()
        return sum(values) / len(values) if values else float("inf")

    return min(seconds, key=mean)


def race(
    groups: Mapping[str, Sequence[str]],
    tasks: Sequence[Task],
    records: Sequence[Record],
    run: Callable[[Task], list[Record]],
    ended: Callable[[int], object] = lambda left: None,
) -> dict[str, str]:
    """Group → the setting that won.

    Args:
        groups: method as it was asked for → its settings.
        tasks: one for each prompt, with all settings and plain decoding.
        records: those of an earlier run; rounds that have none are run now.
        run: runs a task and writes its records.
        ended: called after each round with the number of settings that are left.
    """
    known = {record.key: record for record in records}
    seen: list[Record] = []
    alive = [name for names in groups.values() for name in names]
    for task in tasks:
        order = sorted(m for m in task.order if m in alive or m == PLAIN)
        own = random.Random(f"{task.suite} {task.prompt.id} {task.repeat}")
        own.shuffle(order)  # so that no two are always neighbours
        task = replace(task, order=tuple(order))
        keys = [(task.suite, task.prompt.id, method, task.repeat) for method in task.order]
        seen += [known[key] for key in keys] if all(key in known for key in keys) else run(task)
        alive = survivors(groups, alive, seen)
        ended(len(alive))
    return {
        asked: _fastest({name: times(seen, name) for name in names if name in alive})
        for asked, names in groups.items()
    }
