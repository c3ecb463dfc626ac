"""A sweep's table: the score of each combination with a 95% interval, the best one first."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from align.common.text import markdown_text
from align.planning.tau import t_quantile
from align.sweeping.config import NESTED, Sweep
from align.sweeping.run import Result
from align.sweeping.trials import Trial, key

SEED = "seed"


@dataclass(frozen=True)
class Row:
    """Trials that differ in their seed alone.

    Attributes:
        low, high: 95% interval, of the mean over seeds (Student's t) or from one run's standard error; NaN = unknown.
    """

    values: tuple[tuple[str, Any], ...]
    score: float
    low: float
    high: float
    steps: int
    runs: int
    failed: str = ""


def rows(sweep: Sweep, found: Sequence[Trial], results: Sequence[Result]) -> list[Row]:
    """Group trials by all but their seed; the best row first, what failed at the end."""
    groups: dict[str, list[tuple[Trial, Result]]] = defaultdict(list)
    once = {key(trial): (trial, result) for trial, result in zip(found, results, strict=True)}
    for trial, result in once.values():  # the same trial drawn twice is one run
        same = [pair for pair in trial.values if pair[0] != SEED]
        groups[json.dumps(same)].append((trial, result))
    made = [_row(members) for members in groups.values()]
    sign = -1 if sweep.maximise else 1
    return sorted(
        made, key=lambda r: (bool(r.failed), sign * r.score if math.isfinite(r.score) else math.inf)
    )


def _row(members: Sequence[tuple[Trial, Result]]) -> Row:
    values = tuple(pair for pair in members[0][0].values if pair[0] != SEED or len(members) == 1)
    steps = members[0][1].steps
    good = [r for _, r in members if not r.failed and math.isfinite(r.score)]
    failed = next((r.failed for _, r in members if r.failed), "")
    if not good:
        return Row(values, math.nan, math.nan, math.nan, steps, 0, failed or "no score")
    middle = mean(r.score for r in good)
    if len(good) > 1:
        wide = t_quantile(0.975, len(good) - 1) * stdev(r.score for r in good) / math.sqrt(len(good))
    else:
        wide = 1.96 * good[0].error
    return Row(values, middle, middle - wide, middle + wide, steps, len(good))


def table(sweep: Sweep, found: Sequence[Trial], results: Sequence[Result]) -> str:
    """Write the table as Markdown."""
    made = rows(sweep, found, results)
    names = list(dict.fromkeys(name for row in made for name, _ in row.values))
    lines = [
        f"| {' | '.join(map(markdown_text, [*(name.replace(NESTED, '.') for name in names), sweep.metric]))} [95%] | steps | runs |",
        "|---" * (len(names) + 3) + "|",
    ]
    for row in made:
        own = dict(row.values)
        cells = [markdown_text(str(own.get(name, ""))) for name in names]
        known = math.isfinite(row.low)
        score = f"{row.score:.4f}" + (f" [{row.low:.4f}, {row.high:.4f}]" if known else "")
        said = markdown_text(f"failed: {row.failed}") if row.failed else score
        lines.append(f"| {' | '.join(cells)} | {said} | {row.steps} | {row.runs} |")
    return "\n".join(lines)
