"""Every system at its best setting: its settings race on prompts that are not measured afterwards (`decode.eval --tune`).

A round is one prompt that every setting still in the race decodes, plain decoding beside them, in an order of its own. A
setting leaves when the paired 99% interval of its speed lies below its system's fastest, which is a rule of thumb, no test:
what is claimed of the winner is measured on other prompts. An output changed beyond rounding ends the race. Who is left is a
function of the records, so that a race that was stopped goes on as it would have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from decode.method_names import PLAIN
from decode.methods.spec import Method, keys_of, swept
from decode.reporting.records import Record
from decode.reporting.statistics import FEWEST, PromptKey, paired_ratio, times
from decode.reporting.summary import BUG

if TYPE_CHECKING:
    from decode.benchmark.runner import Task

SUITE = "builtin"
"""Where the prompts come from: those of this project, which are no benchmark."""
PROMPTS = 12
LEVEL = 0.99
"""Of the interval that has to lie below the fastest."""


def settings_to_try(
    methods: Sequence[Method], sweep: Sequence[str], fixed: Container[str] = ()
) -> dict[str, list[Method]]:
    """Method as it was asked for → its settings: every combination of the system's own grid for the options that it leaves open,
    those of `sweep` (`key=v1,v2`) in their place where they name the same option. `fixed`: options that no grid changes.

    Raises:
        UserError: a malformed word, or a key that no method has.
    """
    swept(methods, sweep)
    words = {word.partition("=")[0]: word for word in sweep}
    found = {}
    for method in methods:
        own = {word.partition("=")[0]: word for word in method.system.grid}
        each = {key: word for key, word in own.items() if key not in fixed} | words
        free = keys_of(method.system) - {*method.given}
        found[method.name] = swept([method], [word for key, word in each.items() if key in free])
    return found


def changed(records: Sequence[Record]) -> list[str]:
    """The methods that changed an output beyond rounding."""
    return list(dict.fromkeys(r.method for r in records if r.divergence and r.divergence.kind == BUG))


def survivors(
    groups: Mapping[str, Sequence[str]], alive: Sequence[str], records: Sequence[Record]
) -> list[str]:
    """Those of `alive`, which took part in every round so far, that are not slower than the fastest of their group beyond chance,
    by seconds per token over the same prompts.
    """
    found = []
    for names in groups.values():
        here = [name for name in names if name in alive]
        seconds = {name: times(records, name) for name in here}
        best = seconds[_fastest(seconds)] if here else {}
        found += [name for name in here if not _slower(seconds[name], best)]
    return found


def _slower(mine: Mapping[PromptKey, float], best: Mapping[PromptKey, float]) -> bool:
    """Whether the interval of the speed, against the fastest, lies below 1; never over few prompts."""
    if mine is best or len(mine.keys() & best.keys()) < FEWEST:
        return False
    ratio = paired_ratio(best, mine, level=LEVEL)
    return ratio is not None and ratio.hi is not None and ratio.hi < 1


def _fastest(seconds: Mapping[str, Mapping[PromptKey, float]]) -> str:
    """Least seconds per token, in the mean over the prompts."""

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
        tasks: one a prompt, each with all settings and plain decoding in its order.
        records: of the rounds that were run before; the others are run now.
        run: one task; writes its records.
        ended: told after a round how many settings are left.
    """
    known = {record.key: record for record in records}
    seen: list[Record] = []
    alive = [name for names in groups.values() for name in names]
    for task in tasks:
        order = sorted(m for m in task.order if m in alive or m == PLAIN)
        own = random.Random(f"{task.suite} {task.prompt.id} {task.repeat}")
        own.shuffle(order)  # no two are always neighbours
        task = replace(task, order=tuple(order))
        keys = [(task.suite, task.prompt.id, method, task.repeat) for method in task.order]
        seen += [known[key] for key in keys] if all(key in known for key in keys) else run(task)
        alive = survivors(groups, alive, seen)
        ended(len(alive))
    return {
        asked: _fastest({name: times(seen, name) for name in names if name in alive})
        for asked, names in groups.items()
    }
