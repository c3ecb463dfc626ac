"""What is printed during a measurement ."""

from __future__ import annotations

import io

import pytest

from decode.evaluation import progress
from specalign.common.terminal import PlainConsole
from tests.measurements import record


def test_a_line_now_and_then_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    printed, none = io.StringIO(), [0] * 20
    console = PlainConsole(file=printed, width=200)
    bar = progress.TaskProgress(console, 4, before=1)
    for name, at in (("a", 10.0), ("b", 40.0), ("c", 41.0)):
        now[0] = at
        seconds = (("plain", 2.0), ("drafter", 1.0))
        bar.finish_task([record(method, name, s, 20, 20, none, none) for method, s in seconds])
    assert bar.speeds() == "plain 10.0, drafter 20.0 (2.00×) tokens/s"
    lines = printed.getvalue().splitlines()
    # the earlier run's task took no time of this one: 40 s for two, so 20 s for the last
    assert [line.partition(" rounds")[0] for line in lines] == ["3/4", "4/4"]
    assert lines[0].endswith("· 0:20 left") and lines[1].endswith("· 0:00 left")
