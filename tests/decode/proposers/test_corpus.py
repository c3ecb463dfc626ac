"""Texts of a file as the target's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.proposers.corpus import read_corpus
from specalign.common.errors import UserError
from specalign.lm.model import Target


def test_one_text_or_a_row_each(target: Target, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": " "}\n{"text": "two"}\n')
    assert read_corpus(tmp_path / "a.txt", target) == [target.text_tokens("one\ntwo")]
    assert read_corpus(tmp_path / "b.jsonl", target) == [
        target.text_tokens(t) for t in ("one", "two")
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"txt": "one"}', "row 1: no key 'text' .did you mean 'txt'"),
        ('{"text": 1}', "needs a string under the key 'text'"),
        ('{"text": "\\ud800"}', "row 1: not valid Unicode at character 0"),
        ('{"text": " "}', "holds no text"),
    ],
)
def test_broken_rows_are_one_line(target: Target, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "c.jsonl").write_text(text + "\n")
    with pytest.raises(UserError, match=says):
        read_corpus(tmp_path / "c.jsonl", target)
