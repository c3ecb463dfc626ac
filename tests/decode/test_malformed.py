"""Wrong inputs to eval and report: one line that names them, exit code 2, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from decode import eval, report
from specalign.common import hub
from specalign.rows import hub_rows
from tests.measurements import quiet

QUIET = quiet(4)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of broken inputs, the working directory of the command; the hub and the registry don't
    answer.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_rows, "hub_reachable", lambda: False)
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    files = {
        "column.jsonl": '{"promt": "a"}\n', "wide.csv": "prompt\n" + "x" * 140_000 + "\n",
        "ok.txt": "Hello there.\n", "data/gsm8k.jsonl": '{"answer": "1"}\n', "file": "",
        "empty_run/notes.txt": "", "old/run.json": "{", "bare/run.json": '{"settings": {}, "suites": []}',
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "broken").mkdir()
    settings: dict[str, object] = {"target": "t", "dtype": "float32", "methods": ["plain"]}
    settings |= {"temperature": 0, "max_new_tokens": 4}
    (tmp_path / "broken/run.json").write_text(json.dumps({"settings": settings, "suites": []}))
    (tmp_path / "broken/records.jsonl").write_text('{"suite": "s"}\n')
    return tmp_path


EVAL = [
    (["--suite", "mtbnch"], "unknown suite 'mtbnch' (did you mean 'mtbench'?)"),
    (["--suite", "gsm8k", "--data-dir", "data"], "row 1 has no 'question'; it has answer"),
    (
        ["--suite", "math500"],
        "suite 'math500' is unavailable from the hub's HuggingFaceH4/MATH-500",
    ),
    (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (
        ["--prompts", "column.jsonl"],
        "no prompt among its columns (promt) (did you mean --prompts-column=promt?)",
    ),
    (["--prompts", "wide.csv"], "wide: 1 of 1 prompt, which this target can't take"),
    (["--prompts", "ok.txt", "--data-dir", "data"], "two sources of prompts"),
    (["--prompts", "ok.txt", "--threads", "100000"], "--threads=100000: at most"),
    (["--methods", "plain,lokup"], "unknown method 'lokup' (did you mean 'lookup'?)"),
    (["--drafter", "lookup"], "give a folder"),
    (["--drafter", "nowhere"], "drafter 'nowhere'"),
    (["--methods", "specdiff:gama=4"], "unknown option 'gama' (did you mean 'gamma'?)"),
    (["--temperature", "-1"], "temperature"),
    (["--dtype", "bf61"], "dtype 'bf61' is unknown"),
    (["--target", "debgu"], "target 'debgu'"),
    (["--out", "file"], "--out=file is a file"),
    (
        ["--out", "empty_run"],
        "holds other files (notes.txt): choose another folder, --out empty_run/eval-1",
    ),
    (["--out", "old"], "run.json: not readable JSON"),
]
REPORT = [
    (["nowhere"], "nowhere: no such folder"),
    (["empty_run"], "empty_run holds no run.json"),
    (["old"], "run.json: not readable JSON"),
    (["bare"], "run.json: settings.dtype is missing"),
    (["broken"], "records.jsonl, line 1: accepted is missing"),
    ([], "DIR"),
]


def check(
    main: Callable[..., None],
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error
    assert expected in error, error


@pytest.mark.parametrize(("arguments", "expected"), EVAL, ids=[" ".join(a) for a, _ in EVAL])
def test_eval_names_what_is_wrong(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    check(eval.main, [*QUIET, *arguments], expected, capsys)


@pytest.mark.parametrize(
    ("arguments", "expected"), REPORT, ids=[" ".join(a) or "nothing" for a, _ in REPORT]
)
def test_report_names_what_is_wrong(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    check(report.main, arguments, expected, capsys)


def test_another_measurement_is_not_continued(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--prompts", "ok.txt", "--out", "o", "--methods", "plain"]
    eval.main([*QUIET, *common])
    capsys.readouterr()
    check(eval.main, [*QUIET, *common, "--seed", "7"], "(seed: 0 there, 7 now)", capsys)
    (place / "ok.txt").write_text("Another prompt.\n")
    check(eval.main, [*QUIET, *common], "prompts_hash", capsys)
    lines = (place / "o/records.jsonl").read_text().splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["method"] == "plain"
