"""Prompts that do not fit are left out and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.terminal import PlainConsole
from decode import eval
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
    assert summary["overall"]["plain"]["prompts"] == 1
    assert "context" in summary["skipped"][0] and summary["skipped"][0].startswith("p: 1 of 2 prompts, which")
