"""Papers' tables: what would run for them, and the whole of it on tiny stand-ins."""

from pathlib import Path

import pytest

from decode import eval
from decode.evaluation.config import EvalConfig
from decode.evaluation.records import Divergence, read_records, read_run
from decode.evaluation.reproductions import REPRODUCTIONS, plan_measurements, reproduce
from decode.evaluation.summary import Summary, summarise
from decode.systems.parsing import read_methods
from specalign.common.errors import UserError
from specalign.suites.registry import SUITES
from tests.measurements import fill_report

SLOW = ("specdiff_table1", "specdiff_lm1b", "specdiff2")
"""Tables of one measurement for each suite, as the others."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in REPRODUCTIONS],
)
def test_every_table_runs_on_stand_ins(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--reproduce", name, "--scale", "tiny", "--device", "cpu", "--no-hf-check"]
    eval.main([*words, "--out", str(tmp_path / "o")])
    page = (tmp_path / "o/reproduction.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    found = REPRODUCTIONS[name]
    assert len(rows) == (4 if found.sweep else len(found.cells))
    assert all("skipped" not in row and "×" in row for row in rows)
    for row, cell in zip(rows, found.cells, strict=False):
        assert row.split(" | ")[:2] == [f"| {cell.target}", cell.suite]  # the published row
        published = "" if cell.tau is None else f"{cell.tau:.2f}"
        assert row.split(" | ")[5].strip() == published
    if not found.sweep:  # the paper's τ in the table, or what it says instead
        assert found.note in page and all(cell.tau or found.note for cell in found.cells)
    assert page.strip() in capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_published_tables_name_suites_and_methods(name: str) -> None:
    found = REPRODUCTIONS[name]
    for own, cells in plan_measurements(name, eval.read_config(["--reproduce", name]), False):
        assert own.suite in SUITES and own.sampling.temperature == found.temperature
        assert own.methods is not None and cells
        assert {cell.suite for cell in cells} == {own.suite}
        for cell in cells:
            read_methods(cell.method)


def test_a_target_chooses_its_rows() -> None:
    plans = plan_measurements(
        "specdiff_table1", EvalConfig(target="openai-community/gpt2-xl"), False
    )
    assert [own.suite for own, _ in plans] == ["cnn_dm", "openwebtext"]
    assert [own.limit_of(own.suite or "") for own, _ in plans] == [1024, 1024]
    with pytest.raises(UserError, match="not in SpecDiff, table 1"):
        plan_measurements("specdiff_table1", EvalConfig(target="gpt2"), False)
    with pytest.raises(UserError, match="did you mean 'dflash'"):
        plan_measurements("dflsh", EvalConfig(), False)


def test_options_that_are_given_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def published(*words: str) -> str:
        config = eval.read_config(["--reproduce", "dflash", *words])
        return reproduce("dflash", config, False, lambda own: found.append(own) or measured)[0]

    found: list[EvalConfig] = []
    folder = fill_report(tmp_path / "o")
    summary = summarise(read_run(folder), read_records(folder))
    summary.overall["block"] = summary.overall["drafter"]
    measured = (summary, folder)
    assert "Not as published" not in published()
    assert {own.max_new_tokens for own in found} == {2048}
    found.clear()
    page = published(
        "--max-new-tokens", "16", "--limit", "2", "--temperature", "0.7", "--seed", "1"
    )
    assert "Not as published: max_new_tokens=16, limit=2, temperature=0.7." in page
    assert {(own.max_new_tokens, own.limit) for own in found} == {(16, 2)}
    assert {own.sampling.temperature for own in found} == {0.7}
    for words in (["--sweep", "draft_tokens=2,4"], ["--tune"], ["--suite", "gsm8k"]):
        with pytest.raises(SystemExit):
            eval.main(["--reproduce", "dflash", *words])
        assert "chooses suites and methods" in capsys.readouterr().err


def test_a_changed_output_ends_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill_report(tmp_path / "o", change=Divergence(4, 7, 8, "BUG", 1.0, 4e-5))
    summary = summarise(read_run(folder), read_records(folder))
    monkeypatch.setattr(eval, "evaluate", lambda *given: (summary, folder))
    words = ["--reproduce", "dflash", "--drafter", "autoregressive=debug"]
    with pytest.raises(SystemExit) as stop:
        eval.main([*words, "--out", str(tmp_path / "p")])
    assert stop.value.code == 1 and "OUTPUT CHANGED" in (tmp_path / "p/reproduction.md").read_text()


def test_tiny_has_prompts_for_every_batch_size() -> None:
    config = eval.read_config(["--reproduce", "dflash", "--batch-size", "4,1"])
    assert {own.limit for own, _ in plan_measurements("dflash", config, True)} == {4}


def test_the_other_suites_still_run(tmp_path: Path) -> None:
    folder = fill_report(tmp_path / "o", change=Divergence(4, 7, 8, "BUG", 1.0, 4e-5))
    summary = summarise(read_run(folder), read_records(folder))
    summary.overall["block"] = summary.overall["drafter"]
    missing = ["math500", "mtbench"]

    def evaluate(own: EvalConfig) -> tuple[Summary, Path]:
        if own.suite in missing:
            raise UserError(f"no {own.suite} here")
        return summary, folder

    config = eval.read_config(["--reproduce", "dflash"])
    page, _ = reproduce("dflash", config, False, evaluate)
    rows = [line for line in page.splitlines() if line.startswith("| Qwen")]
    skipped = [row for row in rows if "skipped" in row]
    assert len(rows) == 7 and len(skipped) == 2
    assert "| math500 | block | 6.08× | skipped: no math500 here | 7.87 |" in skipped[0]
    assert page.count(": OUTPUT CHANGED by drafter") == 5  # the others
    missing += [cell.suite for cell in REPRODUCTIONS["dflash"].cells]
    with pytest.raises(UserError, match="no gsm8k here"):
        reproduce("dflash", config, False, evaluate)
