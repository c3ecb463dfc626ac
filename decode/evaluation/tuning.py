"""`decode.eval --tune`: the fastest options of every system, measured on other prompts, in a
separate measurement, which resumes like any other."""

from collections.abc import Container, Sequence
from dataclasses import replace

from decode.engine.decoder import Decoder
from decode.evaluation.config import TUNING_SUITE, EvalConfig
from decode.evaluation.plan import EvalPlan, make_decoders
from decode.evaluation.session import measure
from decode.evaluation.statistics import times
from decode.systems.parsing import Method, Sweep, sweep_methods
from decode.systems.registry import PLAIN
from specalign.common.terminal import PlainConsole
from specalign.common.text import plural
from specalign.suites.registry import prompts_of


class OutputChanged(Exception):
    """Outputs changed beyond rounding; the message names the methods and the report."""


def list_candidates(
    methods: Sequence[Method], sweep: Sweep, fixed: Container[str] = ()
) -> dict[str, list[Method]]:
    """Method as it was asked for → its candidates: every combination of values of the options that
    it leaves open. Values come from `sweep`, else from the system's own grid, except for the
    `fixed` options. Raises UserError for a swept option that no method has."""
    sweep.check(methods)
    found = {}
    for method in methods:
        grid = {k: numbers for k, numbers in method.system.grid.items() if k not in fixed}
        values = {key: [str(number) for number in numbers] for key, numbers in grid.items()}
        free = method.system.limits().keys() - method.given
        open_values = {k: texts for k, texts in {**values, **sweep.values}.items() if k in free}
        found[method.name] = sweep_methods([method], Sweep(values=open_values))
    return found


def tune(
    config: EvalConfig, plan: EvalPlan, console: PlainConsole, command: str
) -> tuple[EvalConfig, EvalPlan, dict[str, Decoder]]:
    """The config, plan and decoders of the measurement that follows, with every method's fastest
    options. Raises UserError if no candidate of a method can decode here, OutputChanged if one is
    not lossless."""
    fixed = ("draft_tokens",) if config.drafting.draft_tokens else ()
    candidates = list_candidates([*plan.methods.values()], config.sweep, fixed)
    tried = {method.name: method for group in candidates.values() for method in group}
    decoders, refused = make_decoders(config, replace(plan, methods=tried))
    groups: dict[str, list[str]] = {}
    for asked, group in candidates.items():
        groups[asked] = [method.name for method in group if method.name in decoders]
        if not groups[asked]:
            raise refused[group[0].name]
    if refused:
        left_out = ", ".join(refused)
        console.say(f"not tuned (these options don't fit the drafters or target): {left_out}")
    best = {asked: group[0] for asked, group in groups.items()}
    contested = {asked: group for asked, group in groups.items() if len(group) > 1}
    lines: list[str] = []
    if contested:
        names = [PLAIN, *(name for settings in contested.values() for name in settings)]
        racing = {name: decoders[name] for name in names}
        fastest, count = _find_fastest(config, plan, racing, contested, console, command)
        best |= fastest
        where = f"{plural(count, 'prompt')} of {TUNING_SUITE}"
        for asked, settings in contested.items():
            lines.append(f"{best[asked]}, of {plural(len(settings), 'setting')} on {where}")
    methods = {name: tried[name] for name in best.values()}
    chosen = {name: decoders[name] for name in methods}
    return replace(config, sweep=Sweep(), tuned=lines), replace(plan, methods=methods), chosen


def _find_fastest(
    config: EvalConfig,
    plan: EvalPlan,
    decoders: dict[str, Decoder],
    groups: dict[str, list[str]],
    console: PlainConsole,
    command: str,
) -> tuple[dict[str, str], int]:
    """For each group, the method with the lowest mean seconds per token over prompts, and the
    number of prompts."""
    settings = plural(len(decoders) - 1, "setting")
    console.say(f"tuning: {settings} of {plural(len(groups), 'method')}")
    size = config.batch_sizes[0]
    limit = max(config.tune or 0, size)
    config = replace(
        config,
        limit=limit,
        batch_sizes=(size,),
        repeats=1,
        out=config.out and config.out / "tuning",
        no_hf_check=True,
        tuning=True,
    )
    suites, skipped = prompts_of(TUNING_SUITE, limit=limit)
    summary, records, folder = measure(config, plan, decoders, suites, skipped, console, command)
    report = folder / "report.html"
    if summary.bugs:
        changed = ", ".join(m for m, figures in summary.overall.items() if figures.bugs)
        raise OutputChanged(f"OUTPUT CHANGED beyond rounding by {changed}: {report}")

    def mean(name: str) -> float:
        values = times(records, name).values()
        return sum(values) / len(values) if values else float("inf")

    best = {asked: min(group, key=mean) for asked, group in groups.items()}
    console.say(f"tuned: {', '.join(best.values())} ({report})")
    return best, summary.overall[PLAIN].prompts
