"""Many methods have a line each."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from decode.reporting.figures import by_suite, ranked
from decode.reporting.records import append, read_records, read_run, write_run
from decode.reporting.render import make_report
from tests.measurements import fill_report as fill


@pytest.mark.slow
def test_many_methods_have_a_line_each(tmp_path: Path) -> None:
    """And no bars side by side; every name is on the axes, over all suites and on each."""
    folder = fill(tmp_path / "run")
    run = read_run(folder)
    run.suites.append({**run.suites[0], "name": "z", "title": "Suite Z"})
    names = [f"lookup:gamma={n}" for n in range(1, 41)]
    run.settings["methods"] += names
    write_run(folder, run)
    rows = read_records(folder)
    append(folder, [replace(r, method=n) for n in names for r in rows if r.method == "lookup"])
    append(folder, [replace(r, suite="z") for r in read_records(folder)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a layout without room is one
        summary, _ = make_report(folder)
    figure = Figure()
    ranked(figure.subplots(), summary, "speedup", "speed-up")
    by_suite(other := figure.subplots(), summary, "tau", "tau")
    for axes, order in ((figure.axes[0], -1), (other, 1)):
        shown = [label.get_text() for label in axes.get_yticklabels()]
        assert shown[::order] == ["lookup", "drafter", *names]
