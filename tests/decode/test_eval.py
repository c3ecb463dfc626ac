"""The eval command on the debug target: records, identity, interleaving, resuming, exit codes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from decode import eval
from decode.evaluation import runner as measure
from decode.evaluation.records import Divergence, read_records
from decode.systems.registry import SYSTEMS
from specalign.common.errors import UserError
from specalign.formats.standalone import save_standalone
from specalign.lm.model import Target
from specalign.suites import registry as chosen
from specalign.suites.prompt import Prompt, Suite
from tests.builders import diffusion_drafter
from tests.measurements import QUIET
from tests.measurements import run_eval as run

pytestmark = pytest.mark.usefixtures("no_plots")


def test_a_changed_output_ends_with_exit_code_1(
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def examine(*given: Any, **more: Any) -> Divergence | None:
        drafted = given[4]
        return Divergence(3, 5, 6, "BUG", 1.5, 0.001) if any(drafted) else None

    monkeypatch.setattr(measure, "explain_divergence", examine)
    with pytest.raises(SystemExit) as stop:
        words = ["--prompts", str(prompts), "--out", str(tmp_path / "o"), "--methods", "lookup"]
        eval.main([*QUIET, *words])
    assert stop.value.code == 1
    output = capsys.readouterr().out
    assert "OUTPUT CHANGED" in " ".join(output.split()) and "BUG" in output
    assert 'class="bug"' in (tmp_path / "o/report.html").read_text()


def test_groups_skip_unavailable_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specalign.suites.sources import Loaded

    def load_suite(suite: Suite, data_dir: Path | None) -> Loaded:
        if suite.name != "gsm8k":
            raise UserError(f"suite {suite.name!r} can't be had")
        return Loaded("gsm8k", "GSM8K", "math", [Prompt("1", "How many?")], "here")

    monkeypatch.setattr(chosen, "load_suite", load_suite)
    summary, _ = run("--suite", "math", "--out", tmp_path / "o", "--methods", "plain")
    assert list(summary.suites) == ["gsm8k"] and len(summary.run.skipped) == 3
    summary, _ = run("--suite", "gsm8k,math500", "--out", tmp_path / "p", "--methods", "plain")
    assert list(summary.suites) == ["gsm8k"] and "math500" in summary.run.skipped[0]
    with pytest.raises(UserError, match="math500"):
        run("--suite", "math500", "--out", tmp_path / "q")


def test_the_methods_side_by_side(prompts: Path, drafter: Path, tmp_path: Path) -> None:
    words = ["--prompts", prompts, "--drafter", drafter, "--out", tmp_path / "o"]
    summary, folder = run(*words, "--repeats", 2)
    records, methods = read_records(folder), ("plain", "lookup", "drafter", "combined")
    assert Counter(r.method for r in records) == dict.fromkeys(methods, 6)
    assert {r.repeat for r in records} == {0, 1} and len({r.key for r in records}) == 24
    for row in records:
        assert row.identical is True and row.divergence is None
        assert row.new_tokens == len(row.tokens) == row.committed + 1 <= 12
        assert row.calls == len(row.accepted) == len(row.drafted)
        assert sum(row.accepted) <= row.committed <= sum(row.accepted) + row.calls
        assert row.tau == pytest.approx(row.committed / row.calls)
        assert row.prefill_seconds > 0 and row.seconds > 0
    assert all(r.tau == 1 and not any(r.drafted) for r in records if r.method == "plain")
    for method in methods:
        figures = summary.suites["mine"][method]
        assert figures.prompts == figures.identical == 3 and figures.bugs == 0 and figures.speedup
    assert summary.suites["mine"]["plain"].speedup.value == 1.0  # type: ignore[union-attr]
    assert summary.settings["drafter_hash"] and len(summary.settings["target_hash"]) == 64
    assert {p.name for p in folder.iterdir()} == {
        "records.jsonl", "run.json", "summary.json", "report.html", "share.png", "replays.json",
    }  # fmt: skip
    assert json.loads((folder / "summary.json").read_text())["verdict"] == summary.verdict


def test_sampled_repeats_draw_other_texts(prompts: Path, drafter: Path, tmp_path: Path) -> None:
    words = ("--prompts", prompts, "--drafter", drafter, "--out", tmp_path / "o")
    summary, folder = run(*words, "--temperature", 1, "--repeats", 2)
    records = read_records(folder)
    assert all(r.identical is None and r.divergence is None for r in records)
    figures = summary.suites["mine"]["drafter"]
    assert figures.identical is None and figures.speedup is not None
    plain = {(r.prompt, r.repeat): r.tokens for r in records if r.method == "plain"}
    assert all(plain[prompt, 0] != plain[prompt, 1] for prompt in "123")


@pytest.mark.slow
def test_a_lossy_verifier_is_marked(prompts: Path, drafter: Path, tmp_path: Path) -> None:
    """In every record, in the summary, the verdict and the page; the exact methods are not."""
    arguments = ["--prompts", prompts, "--drafter", drafter, "--verifier", "lossy_top_beta"]
    eval.main([*QUIET, *map(str, [*arguments, "--out", tmp_path / "o"])])  # no exit code 1
    records = read_records(tmp_path / "o")
    for row in records:
        assert row.lossy == (row.method in ("drafter", "combined"))
        assert (row.verifier == "lossy_top_beta") == row.lossy
        assert row.divergence is None
    assert any(r.lossy and r.identical is False for r in records)
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert [m for m, f in summary["overall"].items() if f["lossy"]] == ["drafter", "combined"]
    assert "NOT LOSSLESS: drafter was verified by lossy_top_beta" in summary["verdict"]
    assert "lossy_top_beta" in (tmp_path / "o/report.html").read_text()


@pytest.mark.slow
def test_every_system_in_one_table(target: Target, prompts: Path, tmp_path: Path) -> None:
    """Every system whose drafter is given, and a line for the others; what a sweep can't build is left
    out."""
    save_standalone(diffusion_drafter(target, "ddit"), tmp_path / "sedd")
    words = ["--prompts", prompts, "--limit", 1, "--drafter", tmp_path / "sedd", "--no-resume"]
    summary, folder = run(*words, "--methods", "all", "--out", tmp_path / "o")
    records = read_records(folder)
    here = [n for n, s in SYSTEMS.items() if s.in_all and set(s.needs) <= {"diffusion"}]
    assert {r.method for r in records} == {"plain", *here}
    assert all(r.identical for r in records if not r.lossy) and summary.bugs == 0
    assert {r.method for r in records if r.lossy} == {"specdec_lossy"}
    assert {r.verifier for r in records if not r.lossy} == {"", "greedy"}  # what ran
    assert any("d2sd: no drafter of kind block" in line for line in summary.run.skipped)
    sweep = ["--methods", "specdiff2:draft_tokens=4", "--sweep", "candidates=2,3,200"]
    summary, _ = run(*words, *sweep, "--out", tmp_path / "q")
    assert len(summary.overall) == 1 + 2  # plain; one is too large
    assert any("candidates=200: at most" in line for line in summary.run.skipped)
