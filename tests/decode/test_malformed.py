"""Wrong inputs to eval and report: one line that names them, exit code 2, no traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        "empty.jsonl": "", "object.json": '{"a": 1}', "ok.txt": "Hello there.\n", "long.txt": "x" * 900 + "\n",
        "data/gsm8k.jsonl": '{"answer": "1"}\n', "hub/openai/gsm8k/readme.md": "no data", "file": "",
        "empty_run/notes.txt": "", "old/run.json": "{", "bare/run.json": '{"settings": {}, "suites": []}',
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "broken").mkdir()
    settings = {"target": "t", "dtype": "float32", "methods": ["plain"]}
    settings |= {"temperature": 0, "max_new_tokens": 4}
    (tmp_path / "broken/run.json").write_text(json.dumps({"settings": settings, "suites": []}))
    (tmp_path / "broken/records.jsonl").write_text('{"suite": "s"}\n')
    return tmp_path


EVAL = [
    (["--suite", "mtbnch"], "unknown suite 'mtbnch' (did you mean 'mtbench'?)"),
    (["--suite", "gsm8k", "--data-dir", "nowhere"], "--data-dir='nowhere': no such folder"),
    (["--suite", "mtbench", "--data-dir", "data"], "expected data/HuggingFaceH4/mt_bench_prompts"),
    (["--suite", "gsm8k", "--data-dir", "hub"], "contains no .parquet, .jsonl, .json or .csv"),
    (["--suite", "math500"], "is unavailable from HuggingFaceH4/MATH-500 on the Hub"),
    (["--prompts", "empty.jsonl"], "--prompts='empty.jsonl' contains no rows"),
    (["--prompts", "ok.txt", "--data-dir", "data"], "mutually exclusive"),
    (["--prompts", "long.txt"], "every prompt was rejected"),
    (["--prompts", "ok.txt", "--suite", "a,b"], "--suite takes a single name"),
    (["--methods", "drafter"], "method 'drafter' needs a drafter, and none is shipped"),
    (["--drafter", "lookup"], "must be a folder"),
    (["mtbench"], "unrecognized argument 'mtbench' (suites follow --suite, methods --methods)"),
    (["--out", "file"], "--out=file is a file"),
    (["--out", "empty_run"], "contains other files (notes.txt): choose another folder"),
    (["--out", "old"], "run.json: not readable JSON"),
    (["--out", "bare"], "contains a measurement with other settings"),
]
REPORT = [
    (["nowhere"], "nowhere: no such folder"),
    (["empty_run"], "empty_run contains no run.json"),
    (["old"], "run.json: not readable JSON"),
    (["bare"], "bare contains no records yet"),
    (["broken"], "records.jsonl, line 1: accepted is missing"),
]


def check(main: Callable[..., None], arguments: list[str], expected: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error
    assert expected in error, error


@pytest.mark.parametrize(("arguments", "expected"), EVAL)
def test_eval_names_what_is_wrong(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    check(eval.main, [*QUIET, *arguments], expected, capsys)


@pytest.mark.parametrize(("arguments", "expected"), REPORT)
def test_report_names_what_is_wrong(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    check(report.main, arguments, expected, capsys)


def test_other_measurements_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--prompts", "ok.txt", "--out", "o", "--methods", "plain"]
    eval.main([*QUIET, *common])
    capsys.readouterr()
    check(eval.main, [*QUIET, *common, "--seed", "7"], "(seed: 0 before, 7 now)", capsys)
    (place / "ok.txt").write_text("Another prompt.\n")
    check(eval.main, [*QUIET, *common], "prompts_hash", capsys)
    lines = (place / "o/records.jsonl").read_text().splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["method"] == "plain"
