"""Papers' tables: what would run for them, and the whole of it on tiny stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode import eval
from decode.evaluation.config import EvalConfig
from decode.evaluation.reproductions import REPRODUCTIONS, plan_measurements
from decode.systems.parsing import read_methods
from specalign.common.errors import UserError
from specalign.suites.registry import SUITES

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
    for own, cells in plan_measurements(name, EvalConfig(), False):
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
