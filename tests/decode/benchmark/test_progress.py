"""What is said while it is measured, where there is no terminal."""

from __future__ import annotations

import io

import pytest

from align.common.terminal import PlainConsole
from decode.benchmark import progress
from decode.reporting.records import Record
from tests.measurements import record


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    return clock


def console() -> tuple[PlainConsole, io.StringIO]:
    said = io.StringIO()
    return PlainConsole(file=said, width=200), said


def round_of(name: str) -> list[Record]:
    accepted = [0] * 20
    return [
        record("plain", name, 2.0, 20, 20, accepted, accepted),
        record("drafter", name, 1.0, 20, 20, accepted, accepted),
    ]


def test_a_line_now_and_then_and_one_at_the_end(now: list[float]) -> None:
    terminal, said = console()
    with progress.TaskProgress(terminal, 4, ["plain", "drafter"], before=1) as bar:
        for name, at in (("a", 10.0), ("b", 40.0), ("c", 41.0)):
            now[0] = at
            bar.step(name, "plain")
            bar.done(round_of(name))
    speeds = bar.speeds()
    assert speeds.startswith("plain ") and "drafter " in speeds and "(2.00×) tokens/s" in speeds
    lines = said.getvalue().splitlines()
    # the round of an earlier run took no time of this one: 40 s for two, so 20 s for the last
    assert [line.partition(" rounds")[0] for line in lines] == ["3/4", "4/4"]
    assert lines[0].endswith("· 0:20 left") and lines[1].endswith("· 0:00 left")


def test_rounds_of_a_race_that_are_read_take_no_time(now: list[float]) -> None:
    terminal, said = console()
    race = progress.RaceProgress(terminal, 4)
    race.done(9)
    assert not said.getvalue()
    race.begin()
    now[0] = 5.0
    race.began = 1.0
    race.done(3)
    assert said.getvalue() == "round 2/4: 3 settings left · 0:08 left at most\n"
