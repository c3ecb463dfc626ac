"""What is left out of a source is counted, and told once."""

from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.rows.prompts import read_prompt_rows
from tests.row_shapes import TALK, UNUSABLE, assistant


def read(rows: list[Any], column: str | None = None) -> list[tuple[str | None, str, str]]:
    found = read_prompt_rows(rows, "data.prompts='f'", column, "data.prompts_column")
    return [(row.conversation.text, row.id, row.category) for row in found]


def test_one_note_counts_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": "a", "answer": "x", "options": ["y"]},
        {"prompt": "b", "answer": "x"},
        {"messages": [*TALK, assistant("z")]},
        {"turns": ["c", "d", "e"]},
        {"prompt": ""},
        {"conversations": [{"from": "gpt", "value": "x"}]},
        {"messages": [{"role": "critic", "content": "x"}]},
    ]
    assert len(read(rows)) == 4
    assert capsys.readouterr().err == (
        "note: data.prompts='f': 3 of 7 rows skipped (2 without a user's text, 1 with an unknown role, 'critic'); "
        "the final answers of 1 row are dropped: the target generates its own; "
        "2 later turns skipped (a list of messages keeps them); "
        "columns not used: answer (2), options (1) (data.prompts_column chooses the column)\n"
    )
    read([{"prompt": "a", "id": 1}])
    assert capsys.readouterr().err == ""


def test_refused_only_where_nothing_can_be_used() -> None:
    for rows, column, says in (
        ([], None, "data.prompts='f' contains no rows"),
        ([{"promt": "a", "b": 1}], None, r"no prompt among its columns \(promt, b\) \(data.prompts_column chooses one\)"),
        ([{"q": "a", "zz": 1}], None, r"no prompt among its columns \(q, zz\) \(data.prompts_column chooses one\)"),
        ([{"prompt": "a"}], "promt", r"no column 'promt' \(did you mean 'prompt'\?\)"),
        ([{"prompt": 1}, {"prompt": [2]}], None, r"no row contains a prompt \(2 .*\); its columns: prompt"),
        ([row for row, _ in UNUSABLE.values()], None, "no row contains a prompt .*5 without a user's"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            read(rows, column)
