"""What ends a text is a token's id or several; anything else is one line."""

from __future__ import annotations

import pytest

from specalign.common.errors import UserError
from specalign.folder.ends import check_ends, end_ids, note_settings


def test_ids_and_what_are_none() -> None:
    assert [end_ids(ids, "a") for ids in (None, 0, [2, 7, 2])] == [set(), {0}, {2, 7}]
    check_ends({"eos_token_id": [2], "text_config": {"eos_token_id": 3}}, "a")
    for config in ({"eos_token_id": "2"}, {"text_config": {"eos_token_id": [2, -1]}}):
        with pytest.raises(UserError, match="^a: eos_token_id: .* is no token's id"):
            check_ends(config, "a")


def test_settings_that_change_a_text_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for ends, own in (((2, 3), 3), ((), 3), ((2,), None)):
        note_settings("m", own, ends, {"top_k": 5, "min_length": 0})
    assert capsys.readouterr().err == ""
    note_settings("m", 30, range(20), {"num_beams": 4})
    said = capsys.readouterr().err
    assert "note: m: its generation config ends a text at 0, 1, 2, 3, 4, 5, 6, 7, …, and" in said
    assert "not at the tokenizer's 30" in said and "asks for num_beams=4: not applied" in said
