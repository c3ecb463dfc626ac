"""Prompts that do not fit are left out and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import run_eval as run

pytestmark = pytest.mark.usefixtures("no_plots")


def test_prompts_longer_than_the_context_are_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("x" * 600 + "\nShort.\n")
    summary, _ = run("--prompts", path, "--out", tmp_path / "o", "--methods", "plain")
    assert summary["overall"]["plain"]["prompts"] == 1
    assert "context" in summary["skipped"][0] and summary["skipped"][0].startswith("p: 1 of 2 prompts, which")
