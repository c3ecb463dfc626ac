"""τ of block drafters over the text tokens and hours that they were trained for, with the fit of `align.plan` and what it foretells.

    python -m tests.curve                    # the table, printed
    python -m tests.curve docs/curve.png     # and its picture

The points are those of align/planning/runs.json, all of one small target. *fit*: through all of them. *foretold*: through runs of at most
as many tokens as one processor's longest there, to show what such a fit is worth ten and twenty times further on.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
from matplotlib.figure import Figure

from align.common.errors import UserError, cli
from align.common.text import say
from align.planning import tau
from decode.reporting.figures import literal_text, set_log_axis

PROCESSOR = 3400
"""Rows of the longest run on a processor."""
DRAFTED = 7
HOWS = ("greedy", "sampling")


def expected(rows: float, how: str, most: int | None = None) -> tau.ExpectedTau:
    """The fit's τ after so many rows; through runs of at most `most` of them, where that is given."""
    record = tau.measured()
    runs = [run for run in record["runs"] if most is None or run["rows"] <= most]
    far = tau.FAR if most is None else float("inf")
    with patch.object(tau, "measured", lambda: {**record, "runs": runs}), patch.object(tau, "FAR", far):
        found = tau.expected_tau("block", rows * record["tokens_per_row"], DRAFTED, how)
    assert found is not None
    return found


def rows_of_the_table() -> list[int]:
    """Those of the measured runs, then ten times the longest of a processor and of all."""
    own = [run["rows"] for run in tau.measured()["runs"] if run["kind"] == "block"]
    return sorted({*own, 10 * PROCESSOR, 10 * max(own)})


def table() -> str:
    """Markdown, a row for each number of tokens."""
    record = tau.measured()
    per_row = record["tokens_per_row"]
    lines = [
        "| text tokens | τ measured, greedy / sampling | fit, greedy [95%] | fit, sampling [95%] | foretold, greedy [95%] |",
        "|---|---|---|---|---|",
    ]
    for rows in rows_of_the_table():
        runs = [r for r in record["runs"] if r["kind"] == "block" and r["rows"] == rows]
        seen = ", ".join(f"{r['greedy']:.2f} / {r['sampling']:.2f}" for r in runs)
        fits = [expected(rows, how) for how in HOWS]
        ahead = _shown(expected(rows, "greedy", PROCESSOR)) if rows > PROCESSOR else ""
        lines.append(f"| {rows * per_row / 1e6:.3g}M | {seen} | {' | '.join(map(_shown, fits))} | {ahead} |")
    return "\n".join(lines)


def _shown(found: tau.ExpectedTau) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]{' (its end)' if found.guess else ''}"


def picture() -> bytes:
    """The points, the fits and their bands, as a PNG."""
    with literal_text():
        record = tau.measured()
        per_row = record["tokens_per_row"]
        own = [r for r in record["runs"] if r["kind"] == "block"]
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        grid = np.geomspace(min(r["rows"] for r in own) / 1.5, tau.FAR * max(r["rows"] for r in own), 60)
        for how, colour in zip(HOWS, ("#1f6f8b", "#c8553d"), strict=True):
            fit = [expected(rows, how) for rows in grid]
            axes.plot(grid * per_row, [f.value for f in fit], color=colour, label=f"{how}, fit and 95% band")
            axes.fill_between(
                grid * per_row, [f.low for f in fit], [f.high for f in fit], color=colour, alpha=0.12, lw=0
            )
            axes.plot([r["rows"] * per_row for r in own], [r[how] for r in own], "o", color=colour, ms=5)
        ahead = grid[grid > PROCESSOR]
        axes.plot(
            ahead * per_row,
            [expected(rows, "greedy", PROCESSOR).value for rows in ahead],
            color="#1f6f8b",
            ls="--",
            label="greedy, foretold by the processor's runs",
        )
        set_log_axis(axes, (per_row * r["rows"] for r in own))
        axes.set_xlabel("text tokens trained on")
        axes.set_ylabel("τ on held-out text")
        axes.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
        return buffer.getvalue()


@cli
def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    if len(words) > 1 or any(not word.endswith(".png") for word in words):
        raise UserError("python -m tests.curve [PICTURE.png]")
    say(table())
    for word in words:
        Path(word).write_bytes(picture())


if __name__ == "__main__":
    main()
