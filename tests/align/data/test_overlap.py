"""Passages of the benchmarks are found in a text, whatever its case and punctuation; the table names what `decode` measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from align.benchmarks.places import PLACES, Place
from align.common.errors import UserError
from align.data import overlap
from decode.suites.registry import SUITES

LONG = (
    "A train leaves the station at noon and the second one leaves an hour later going faster than the first"
)
WHOLE = "Write a poem about the moon and tides"  # eight words


def test_passages_are_found_whole_or_by_thirteen_words() -> None:
    passages = overlap.Passages([LONG, WHOLE, "too short to look for"])
    start = LONG.split()[3:16]
    assert passages.met_in("x y " + " ".join(start).upper().replace(" ", ", ") + " z")
    assert not passages.met_in("x y " + " ".join(start[:-1]) + " z")  # twelve words
    assert passages.met_in(f"Then: {WHOLE}!") and not passages.met_in(WHOLE[:-6])
    assert not passages.met_in("too short to look for") and not overlap.Passages().met_in(LONG)


def test_files_and_suites_that_can_not_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"turns": [LONG, {"answer": WHOLE}], "id": 3}) + "\n")

    def nowhere(place: Place) -> list[object]:
        if place == PLACES["gsm8k"]:
            return [{"question": "one two three four five six seven eight nine"}]
        raise UserError("not here")

    monkeypatch.setattr(overlap, "_rows", nowhere)
    passages, missing = overlap.excluded([str(path), "suites"])
    assert passages.met_in(LONG) and passages.met_in(WHOLE)
    assert passages.met_in("One two three four, five six seven eight nine.")
    assert set(missing) == PLACES.keys() - {"gsm8k"}
    own = [row["prompt"] for suite in SUITES.values() for row in suite.rows]
    long = [text for text in own if len(overlap.words(text)) >= overlap.SHORTEST]
    assert len(long) > 50 and all(passages.met_in(f"Before. {text} After.") for text in long)
    with pytest.raises(UserError, match="no such file"):
        overlap.excluded([str(tmp_path / "gone.jsonl")])
