"""The verdict's page and record: what a bug, a stop or an idle drafter makes of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from decode.losslessness.cases import VerifyConfig
from decode.losslessness.verdict import Caught, Check, Tested, line, read_tested, write_verdict

PAIR = {"target": "t", "drafter": "d", "prompts": 3, "max_new_tokens": 8, "device": "cpu", "git_commit": None}
RIGHT = Check("greedy", "block", True, 3, {"drafted": 9, "accepted": 4}, "equal")
WRONG = Check("sampled", "block", False, 400, {"drafted": 9, "accepted": 4}, "far off")
IDLE = Check("greedy", "lookup", True, 3, {"drafted": 0}, "equal")


@pytest.mark.parametrize(
    ("checks", "finished", "head"),
    [
        ([RIGHT], True, "LOSSLESS: no difference"),
        ([RIGHT, IDLE], True, "(in 1 of 2 checks nothing was drafted)"),
        ([RIGHT], False, "UNFINISHED: no bug in the first 1 checks"),
        ([RIGHT, WRONG], False, "NOT LOSSLESS: 1 of 2 checks found a bug"),
    ],
)
def test_a_verdict_says_what_was_found(
    checks: list[Check], finished: bool, head: str, tmp_path: Path
) -> None:
    page = write_verdict(tmp_path, checks, PAIR, finished)
    assert head in page.splitlines()[0] and (tmp_path / "verdict.md").read_text() == page
    assert "prompted" not in page
    switched = write_verdict(tmp_path / "s", checks, PAIR | {"prompted": "enable_thinking=false"}, finished)
    assert "\nprompted with enable_thinking=false\n" in switched
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert record["lossless"] is (finished and WRONG not in checks) and len(record["checks"]) == len(checks)


def test_a_check_in_which_nothing_was_drafted_is_not_called_ok() -> None:
    plain = Check("sampled", "plain", True, 3, {"drafted": 0}, "equal")
    assert [line(c)[:3] for c in (RIGHT, WRONG, IDLE, plain)] == ["ok ", "BUG", "—  ", "ok "]


def test_methods_that_were_not_seen_stand_in_a_line_each(tmp_path: Path) -> None:
    """Their names hold commas."""
    figures = {"drafted": 9, "accepted": 4, "sees": 0.21}
    names = ("block, tree, recursive", "lookup")
    unseen = [Check("sampled", name, True, 9, {**figures, "sees_whole": None}, "") for name in names]
    seen = Check("sampled", "chain", True, 9, {**figures, "sees_whole": 0.34}, "")
    other = Check("sampled", "tree", True, 9, {**figures, "sees_whole": 0.14}, "")
    lines = write_verdict(tmp_path, [seen, other, *unseen], PAIR, True).splitlines()
    assert [row for row in lines if row.startswith("- ")] == [f"- {name}" for name in names]
    sentence = next(row for row in lines if row.startswith("What sampling shows"))
    assert (
        "moves 0.21 of the probability" in sentence
        and "from 0.34 on in every one that accepted enough." in sentence
    )


def test_another_run_is_begun_anew(tmp_path: Path) -> None:
    asked = VerifyConfig(self_test=True).asked()
    assert read_tested(tmp_path, asked) == Tested()
    bug, content = Caught("odd", "greedy", "chain", True, ""), {"target": "1"}
    write_verdict(tmp_path, [RIGHT], {**PAIR, "content": content}, False, [bug], asked)
    assert read_tested(tmp_path, asked) == Tested([RIGHT], [bug], content)
    assert read_tested(tmp_path, {**asked, "samples": 1}) == read_tested(tmp_path, {**asked, "code": ""})
    assert read_tested(tmp_path, {**asked, "code": ""}) == Tested()
    record = json.loads((tmp_path / "verdict.json").read_text())
    check = {**record["checks"][0], "figures": [], "seconds": "x"}
    for text in ("[]", "{", "{}", "null", json.dumps({**record, "checks": [check]})):
        (tmp_path / "verdict.json").write_text(text)
        assert read_tested(tmp_path, asked) == Tested()
    (tmp_path / "verdict.json").unlink()
    os.mkfifo(tmp_path / "verdict.json")
    assert read_tested(tmp_path, asked) == Tested()
