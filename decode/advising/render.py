"""Advice as Markdown tables and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.advising.advice import Advice, DecodingCosts, summarize
from decode.advising.run import TIMED_BATCHES


def render(costs: DecodingCosts, advice: Sequence[Advice]) -> str:
    """Markdown: what was measured, what is fastest where, and one sentence."""
    sentence = summarize(advice)
    parts = [
        "## What a forward pass of the target costs, ms",
        _render_forward(costs),
        "## What drafting does",
        _render_drafting(costs),
        "## What is fastest",
        _render_gains(advice),
        f"**{sentence[0].upper()}{sentence[1:]}.**",
    ]
    return "\n\n".join(parts)


def _render_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(row) for row in (titles, *rows)]
    return "\n".join(
        [f"| {lines[0]} |", "|---" * len(titles) + "|", *(f"| {line} |" for line in lines[1:])]
    )


def _render_forward(costs: DecodingCosts) -> str:
    forward = costs.forward
    widths = sorted({n for _, n in forward.short})
    batches = sorted({b for b, _ in forward.short})
    cells = [[str(b), *(f"{1e3 * forward.short[b, n]:.1f}" for n in widths)] for b in batches]
    table = _render_table(["batch", *(f"{n} rows" for n in widths)], cells)
    slopes = ", ".join(f"{1e6 * s:.2f} µs ({n} rows)" for n, s in sorted(forward.slope.items()))
    drafting = f"{1e6 * costs.draft_slope:.2f} µs"
    return f"{table}\n\nA token of context adds per request: {slopes or 'unknown'}; to drafting {drafting}."


def _render_drafting(costs: DecodingCosts) -> str:
    titles = ["drafts", "temperature", "τ", "accepted at least 1, 2, …", "drafting, ms", "round without the forward pass, ms", "each further request, ms"]  # fmt: skip
    rows = []
    for (size, temperature), seen in costs.observed.items():
        reach = " ".join(f"{share:.2f}" for share in seen.reach)
        times = [f"{1e3 * seconds:.1f}" for seconds in (seen.draft, seen.overhead, seen.further)]
        rows.append([size.label, f"{temperature:g}", f"{seen.tau:.2f}", reach, *times])
    return _render_table(titles, rows)


def _render_gains(advice: Sequence[Advice]) -> str:
    largest = max(advice[0].gains)
    batches = [b for b in TIMED_BATCHES if b <= largest]
    rows = []
    for a in advice:
        cells = [f"{size.label} {gain:.2f}×" for size, gain in (a.gains[b] for b in batches)]
        limit = "the largest measured" if a.pays_up_to == largest else str(a.pays_up_to or "never")
        rows.append([str(a.context), f"{a.temperature:g}", *cells, limit])
    titles = [
        "context",
        "temperature",
        *(f"batch {b}" for b in batches),
        "drafting pays up to batch",
    ]
    return _render_table(titles, rows)


def to_dict(costs: DecodingCosts, advice: Sequence[Advice]) -> dict[str, Any]:
    """Plain values, for advice.json."""
    return {
        "calls": [
            {"batch": b, "rows": n, "seconds": s} for (b, n), s in costs.forward.short.items()
        ],
        "seconds_per_token_of_context": costs.forward.slope,
        "drafting_seconds_per_token_of_context": costs.draft_slope,
        "observed": [
            {**vars(seen), "setting": vars(size), "temperature": temperature}
            for (size, temperature), seen in costs.observed.items()
        ],
        "advice": [
            {
                "context": a.context,
                "temperature": a.temperature,
                "best": a.gains[1][0].options,
                "pays_up_to_batch": a.pays_up_to,
                "gains": {
                    b: {"setting": s.options, "speed_up": gain} for b, (s, gain) in a.gains.items()
                },
            }
            for a in advice
        ],
        "sentence": summarize(advice),
    }
