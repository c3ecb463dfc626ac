"""`decode.eval --tune`: the candidates, the fastest one, and the measurement that follows."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from align.config.drafter import DrafterConfig
from align.makers.block import from_target
from decode.evaluation import runner as measure
from decode.evaluation.records import Divergence, Record, read_records, read_run
from decode.evaluation.summary import Summary
from decode.evaluation.tuning import list_candidates
from decode.systems.parsing import read_method, read_sweep
from specalign.common.errors import UserError
from specalign.formats.block import save_drafter
from specalign.lm.model import Target
from tests.measurements import run_eval as measured


def test_what_is_given_stays_and_a_sweep_replaces_the_grid() -> None:
    def names(text: str, sweep: Sequence[str] = ()) -> list[str]:
        return [m.name for m in list_candidates([read_method(text)], read_sweep(sweep))[text]]

    assert names("specdiff:draft_tokens=2:steps=1") == ["specdiff:draft_tokens=2:steps=1"]
    steps = [f"specdiff:draft_tokens=2:steps={t}" for t in (1, 2)]
    assert names("specdiff:draft_tokens=2") == steps
    asked = read_method("lookup")
    assert list_candidates([asked], read_sweep([]), fixed=("draft_tokens",)) == {"lookup": [asked]}
    swept = [f"lookup:draft_tokens={n}" for n in (3, 5)]
    assert names("lookup", ["draft_tokens=3,5"]) == swept
    swept = [f"lookup:draft_tokens=3:longest={n}" for n in (1, 2)]
    assert names("lookup", ["longest=1,2", "draft_tokens=3"]) == swept
    with pytest.raises(UserError, match="no method here leaves the option 'steps' open"):
        names("lookup", ["steps=1,2"])
    assert names("lookup", ["draft_tokens=3"]) == ["lookup:draft_tokens=3"]


# ---- the command ----

pytestmark = pytest.mark.usefixtures("no_plots")


def run(*words: Any) -> tuple[Summary, Path]:
    return measured("--max-new-tokens", 6, *words)


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[Record], None]) -> None:
    """Every record of a task is changed before anybody sees it."""
    honest = measure.run_tasks

    def run_tasks(*arguments: Any) -> list[Record]:
        records = honest(*arguments)
        for made in records:
            change(made)
        return records

    monkeypatch.setattr(measure, "run_tasks", run_tasks)


def test_the_command_tunes(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(r: Record) -> None:
        r.seconds = r.committed * (1.0 if r.method == "lookup:draft_tokens=4" else 2.0)

    changing(monkeypatch, timed)
    words: list[Any] = ["--methods", "lookup,retrieval:draft_tokens=2", "--tune", 6]
    words += ["--out", tmp_path / "o", "--prompts"]
    summary, folder = run(*words, prompts)
    assert list(summary.overall) == ["plain", "lookup:draft_tokens=4", "retrieval:draft_tokens=2"]
    assert summary.settings["tuned"] == [
        "lookup:draft_tokens=4, of 4 settings on 6 prompts of builtin"
    ]
    assert summary.settings["sweep"] == [] and summary.settings["tune"] == 6
    assert "lookup:draft_tokens=4, of 4 settings" in (folder / "report.html").read_text()
    tuning = read_records(folder / "tuning")
    assert {r.suite for r in tuning} == {"builtin"} and len({r.prompt for r in tuning}) == 6
    assert read_run(folder / "tuning").settings["max_new_tokens"] == 6
    said = json.loads((folder / "tuning" / "summary.json").read_text())["verdict"]
    assert said.startswith("Tuning, not a measurement") and "UNFINISHED" not in said
    assert not {r.prompt for r in tuning} & {r.prompt for r in read_records(folder)}

    def never(*args: Any) -> list[Record]:
        raise AssertionError("all of it is there")

    monkeypatch.setattr(measure, "run_tasks", never)
    again, _ = run(*words, prompts)
    assert again.overall == summary.overall
    with pytest.raises(UserError, match=r"\(seed: 0 before, 1 now\)"):  # before tuning
        run(*words, prompts, "--seed", 1)


def test_tuning_has_one_batch_size_and_prompts_for_it(prompts: Path, tmp_path: Path) -> None:
    words = ("--methods", "lookup", "--tune", 5, "--out", tmp_path / "o", "--prompts", prompts)
    summary, folder = run(*words, "--batch-size", "8,1")
    assert {r.batch for r in read_records(folder / "tuning")} == {8} and summary.batch == 1
    assert len({r.prompt for r in read_records(folder / "tuning")}) == 8


def test_a_bug_ends_tuning(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(r: Record) -> None:
        if r.method == "lookup:draft_tokens=8":
            r.divergence = Divergence(0, 1, 2, "BUG")

    changing(monkeypatch, broken)
    for _ in range(2):  # the same command again does not get past it
        with pytest.raises(SystemExit) as stop:
            run("--methods", "lookup", "--tune", 5, "--out", tmp_path / "o", "--prompts", prompts)
        assert stop.value.code == 1
    assert not (tmp_path / "o" / "records.jsonl").exists()


def test_impossible_settings_are_left_out(target: Target, prompts: Path, tmp_path: Path) -> None:
    options = DrafterConfig(block_size=3, layers=1, markov_rank=0)
    save_drafter(from_target(target, options, None), tmp_path / "d")
    words: list[Any] = ["--drafter", tmp_path / "d", "--methods", "block", "--prompts", prompts]
    words += ["--out", tmp_path / "o"]
    summary, folder = run(*words, "--tune", 5, "--sweep", "draft_tokens=1,3,4")
    racing = {r.method for r in read_records(folder / "tuning")}
    assert racing == {"plain", "block:draft_tokens=1", "block:draft_tokens=3"}
    with pytest.raises(UserError, match="drafts at most 3 tokens"):
        run(*words[:-1], tmp_path / "q", "--tune", 5, "--sweep", "draft_tokens=4,5")
    assert next(m for m in summary.overall if m != "plain") in racing


def test_one_does_not_choose_on_what_one_measures(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--tune uses the prompts of builtin: measure on others"):
        run("--methods", "lookup", "--tune", "--out", tmp_path / "o")
    with pytest.raises(UserError, match="--tune uses"):
        run("--suite", "mtbench,builtin", "--methods", "lookup", "--tune", "--out", tmp_path / "o")
