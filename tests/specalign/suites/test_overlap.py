"""Passages of the benchmarks are found in a text, whatever its case and punctuation."""

import html
import json
import unicodedata
from pathlib import Path

import pytest

from specalign.common.errors import UserError
from specalign.suites import overlap
from specalign.suites.prompt import Place
from specalign.suites.registry import SUITES

LONG = "A train leaves the station at noon and the second one leaves an hour later going faster than the first"
WHOLE = "Write a poem about the moon and tides"  # eight words


def test_passages_are_found_whole_or_by_thirteen_words() -> None:
    passages = overlap.Passages({"a": [LONG, LONG, "too short to look for"], "b": [WHOLE, LONG]})
    start = LONG.split()[3:16]
    found = passages.find_in("x y " + " ".join(start).upper().replace(" ", ", ") + " z")
    assert found == {"a", "b"} == {*passages.owners}
    assert not passages.find_in("x y " + " ".join(start[:-1]) + " z")  # twelve words
    assert passages.find_in(f"Then: {WHOLE}!") == {"b"} and not passages.find_in(WHOLE[:-6])
    assert not passages.find_in("too short to look for")
    assert not overlap.Passages[str]({}).find_in(LONG)


LINES = (
    'Which word does not belong?\n\ttyre, "steering wheel",\tcar, naïve engine’s end, café & bar'
)


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(LINES),
        json.dumps(LINES, ensure_ascii=False),
        LINES.encode("unicode_escape").decode(),
        html.escape(LINES).replace("ï", "&iuml;").replace(" ", "&nbsp;"),
        html.escape(LINES).replace("word", "<b>word</b>").replace("\n", "<br/>\n<p class='x'>"),
        unicodedata.normalize("NFD", LINES),
    ],
)
def test_passages_are_found_as_source_code_json_and_html_write_them(written: str) -> None:
    assert overlap.Passages({"a": [LINES]}).find_in(f"x = {written}")
    assert overlap.Passages({"a": [written]}).find_in(f"Then: {LINES}")


def test_files_and_suites_are_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"turns": [LONG, {"answer": WHOLE}], "id": 3}) + "\n")

    def read(place: Place, under: str) -> tuple[list[object], str]:
        if place == SUITES["gsm8k"].place:
            return [{"question": "one two three four five six seven eight nine"}], "the hub"
        raise UserError("not here")

    monkeypatch.setattr(overlap, "read_place", read)
    passages, missing = overlap.read_excluded([str(path), "suites"])
    assert passages.find_in(LONG) == passages.find_in(WHOLE) == {str(path)}
    assert passages.find_in("One two three four, five six seven eight nine.") == {"gsm8k"}
    assert set(missing) == {s.name for s in SUITES.values() if s.excluded and not s.rows} - {
        "gsm8k"
    }
    own = [row["prompt"] for suite in SUITES.values() for row in suite.rows]
    assert len(own) > 50 and all(passages.find_in(f"Before. {text} After.") for text in own)
    with pytest.raises(UserError, match="no such file"):
        overlap.read_excluded([str(tmp_path / "gone.jsonl")])
