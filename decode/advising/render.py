"""Advice as tables and a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.advising.advice import Advice, Costs, sentence
from decode.advising.observed import PLAIN
from decode.advising.run import Point


def render(costs: Costs, found: Sequence[Advice], points: Sequence[Point] = ()) -> str:
    """Markdown: what was measured, what is fastest where, the sentence, and the check."""
    lines = [
        "## What a call of the target costs, ms",
        "",
        *_calls(costs),
        "",
        "## What drafting does",
        "",
        *_drafting(costs),
    ]
    lines += [
        "",
        "## What is fastest",
        "",
        *_gains(found),
        "",
        f"**{sentence(found)[0].upper()}{sentence(found)[1:]}.**",
    ]
    if points:
        lines += ["", "## Checked on points that were not measured", "", *_points(points)]
    return "\n".join(lines)


def _calls(costs: Costs) -> list[str]:
    verify = costs.verify
    rows = sorted({n for _, n in verify.short})
    lines = [f"| batch | {' | '.join(f'{n} rows' for n in rows)} |", "|---" * (len(rows) + 1) + "|"]
    for batch in sorted({b for b, _ in verify.short}):
        lines.append(f"| {batch} | {' | '.join(f'{1e3 * verify.short[batch, n]:.1f}' for n in rows)} |")
    if verify.slope:
        slopes = ", ".join(f"{1e6 * s:.2f} µs ({n} rows)" for n, s in sorted(verify.slope.items()))
        lines += [
            "",
            f"A token of context adds, for each request: {slopes}; to drafting {1e6 * costs.draft_slope:.2f} µs.",
        ]
    return lines


def _drafting(costs: Costs) -> list[str]:
    lines = [
        "| drafts | temperature | τ | accepted at least 1, 2, … | drafting, ms | host, ms | each further request, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    longest = max((s.tokens for s in costs.settings() if not s.nodes), default=0)
    for (setting, temperature), seen in costs.observed.items():
        if not setting.nodes and 0 < setting.tokens < longest:  # made of the longest chain
            continue
        reach = " ".join(f"{r:.2f}" for r in seen.reach)
        what = "none" if setting == PLAIN else setting.words
        lines.append(
            f"| {what} | {temperature:g} | {seen.tau:.2f} | {reach} | {1e3 * seen.draft:.1f} | {1e3 * seen.host:.1f} | {1e3 * seen.further:.1f} |"
        )
    return lines


def _gains(found: Sequence[Advice]) -> list[str]:
    batches = list(found[0].gains)
    lines = [
        f"| context | temperature | {' | '.join(f'batch {b}' for b in batches)} | drafting pays up to batch |",
        "|---" * (len(batches) + 3) + "|",
    ]
    for a in found:
        cells = " | ".join(f"{setting.words} {gain:.2f}×" for setting, gain in a.gains.values())
        last = f"{a.most}, the largest timed" if a.last == a.most else str(a.last) if a.last else "never"
        lines.append(f"| {a.context} | {a.temperature:g} | {cells} | {last} |")
    return lines


def _points(points: Sequence[Point]) -> list[str]:
    lines = [
        "| drafts | batch | temperature | tokens/s foretold | measured | off by |",
        "|---|---|---|---|---|---|",
    ]
    for p in points:
        what = "none" if p.setting == PLAIN else p.setting.words
        lines.append(
            f"| {what} | {p.batch} | {p.temperature:g} | {p.foretold:.1f} | {p.measured:.1f} | {p.off:+.0%} |"
        )
    return lines


def as_dict(costs: Costs, found: Sequence[Advice], points: Sequence[Point]) -> dict[str, Any]:
    """Plain values, for advice.json."""
    return {
        "calls": [{"batch": b, "rows": n, "seconds": s} for (b, n), s in costs.verify.short.items()],
        "seconds_per_token_of_context": costs.verify.slope,
        "drafting_seconds_per_token_of_context": costs.draft_slope,
        "observed": [{**vars(o), "setting": vars(o.setting), "tau": o.tau} for o in costs.observed.values()],
        "advice": [
            {
                "context": a.context,
                "temperature": a.temperature,
                "best": a.best.options,
                "pays_up_to_batch": a.last,
                "gains": {b: {"setting": s.options, "speed_up": g} for b, (s, g) in a.gains.items()},
            }
            for a in found
        ],
        "sentence": sentence(found),
        "points": [{**vars(p), "setting": p.setting.options, "off": p.off} for p in points],
    }
