"""The eval command on the debug target: records, identity, interleaving, resuming, exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from align.common.errors import UserError
from align.config.recipe import DrafterConfig
from align.models.block_checkpoint import save_drafter
from align.target.model import Target
from align.training.makers import from_target
from decode import eval
from decode.benchmark import runner as measure
from decode.engine.output import Tree
from decode.reporting.records import Divergence
from decode.suites import registry as chosen
from decode.suites.prompt import Prompt, Suite
from tests.builders import QUIET
from tests.builders import run_eval as run

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module")
def drafter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = DrafterConfig(block_size=3, layers=1, markov_rank=0)
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(from_target(target, options, None), folder, dtype=torch.float32)
    return folder


def test_a_changed_output_ends_with_exit_code_1(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(
        target: Target,
        prompt: list[int],
        plain: list[int],
        other: list[int],
        drafted: list[int],
        accepted: list[int],
        trees: list[Tree | None],
        **more: Any,
    ) -> Divergence | None:
        return Divergence(3, 5, 6, "BUG", 1.5, 0.001) if any(drafted) else None

    monkeypatch.setattr(measure, "examine", examine)
    with pytest.raises(SystemExit) as stop:
        eval.main([*QUIET, "--prompts", str(prompts), "--out", str(tmp_path / "o"), "--methods", "lookup"])
    assert stop.value.code == 1
    output = capsys.readouterr().out
    assert "OUTPUT CHANGED" in " ".join(output.split()) and "BUG" in output
    assert 'class="bug"' in (tmp_path / "o/report.html").read_text()


def test_the_command_prints_table_sources_verdict_and_what_is_next(
    prompts: Path, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eval.main([*QUIET, "--prompts", str(prompts), "--out", str(tmp_path / "o"), "--drafter", str(drafter)])
    output = " ".join(capsys.readouterr().out.split())
    for part in (
        "tokens/s",
        "τ",
        "3/3",
        "mine: 3 prompts from",
        "identical to plain",
        "report.html",
        "Next:",
        "3/3 rounds",
    ):
        assert part in output, part


def test_a_group_leaves_out_what_no_source_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from decode.suites.sources import Loaded

    def load_suite(suite: Suite, data_dir: Path | None) -> Loaded:
        if suite.name != "gsm8k":
            raise UserError(f"suite {suite.name!r} can't be had")
        return Loaded("gsm8k", "GSM8K", "math", [Prompt("1", "How many?")], "here")

    monkeypatch.setattr(chosen, "load_suite", load_suite)
    summary, _ = run("--suite", "math", "--out", tmp_path / "o", "--methods", "plain")
    assert list(summary["suites"]) == ["gsm8k"] and len(summary["skipped"]) == 3
    with pytest.raises(UserError, match="math500"):
        run("--suite", "gsm8k,math500", "--out", tmp_path / "p")
