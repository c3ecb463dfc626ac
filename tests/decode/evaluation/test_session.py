"""Prompts that do not fit are left out and named."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from decode import eval
from decode.evaluation import session
from decode.evaluation.records import read_run
from specalign.common.terminal import PlainConsole
from tests.builders import switching_target
from tests.measurements import QUIET

pytestmark = pytest.mark.usefixtures("no_plots")


def test_prompts_longer_than_the_context_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.txt"
    path.write_text("x" * 600 + "\nShort.\n")
    config = eval.read_config(
        [*QUIET, "--prompts", str(path), "--out", str(tmp_path / "o"), "--methods", "plain"]
    )
    summary, _ = eval.evaluate(config, PlainConsole(wide=True))
    assert capsys.readouterr().out.count("left out: p: 1 of 2 prompts, which") == 1
    assert summary.overall["plain"].prompts == 1
    assert "context" in summary.run.skipped[0]


def test_a_measurement_that_goes_on_another_day_says_the_same_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the target's chat template reads the clock."""
    target = switching_target()
    template = target.tokenizer.chat_template
    target.tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + template
    target.model.save_pretrained(str(tmp_path / "T"))
    target.tokenizer.save_pretrained(str(tmp_path / "T"))
    words = [w if w != "debug" else str(tmp_path / "T") for w in QUIET]
    (tmp_path / "p.txt").write_text("Short.\n")
    words += ["--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path / "o")]
    words += ["--methods", "plain"]
    found = []
    for day in (1, 2):

        class Day(datetime.date):
            @classmethod
            def today(cls, day: int = day) -> Day:
                return cls(2026, 12, day)

        monkeypatch.setattr(session.datetime, "date", Day)
        eval.evaluate(eval.read_config(words), PlainConsole(wide=True))
        found.append(read_run(tmp_path / "o").settings)
    assert found[0]["date"] == "2026-12-01" and found[0] == found[1]
