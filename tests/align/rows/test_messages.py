"""Messages in every spelling."""

from __future__ import annotations

import json

import pytest

from align.rows.conversation import ROLES
from align.rows.messages import UnusableRow, decoded, is_message, read_messages, text_of, without_nulls


def test_roles_in_every_spelling() -> None:
    for role, spellings in ROLES.items():
        for spelling in spellings.split():
            for written in (spelling, spelling.upper(), f" {spelling.title()} ", spelling.replace("_", "-")):
                assert read_messages([{"role": written, "content": "x"}]) == [{"role": role, "content": "x"}]
    with pytest.raises(UnusableRow, match="an unknown role, 'narrator'$"):
        read_messages([{"role": "narrator", "content": "x"}])
    for written, role in (("asistant", "assistant"), ("Usre", "user"), ("humn", "user"), ("sytem", "system")):
        with pytest.raises(UnusableRow, match=f"an unknown role, '{written}' .did you mean '{role}'"):
            read_messages([{"role": written, "content": "x"}])


def test_content_is_always_a_string() -> None:
    part = {"type": "text", "text": "a"}
    assert [text_of(c) for c in (None, "a", part, [part, "b", None])] == ["", "a", "a", "a\nb"]
    for content in (3, [3], [{"type": "image"}], [{"type": "text", "text": None}]):
        with pytest.raises(UnusableRow, match="no text"):
            text_of(content)


def test_a_message_has_no_other_columns() -> None:
    """The row of a table may have a role too."""
    assert is_message({"role": "user", "content": "x", "weight": 1}) and is_message(
        {"from": "a", "value": "x"}
    )
    assert not is_message({"role": "user", "content": "x", "message_id": 1}) and not is_message({"a": "x"})


def test_what_a_string_holds() -> None:
    assert decoded("[1, {'a': None}]") == [1, {"a": None}] == decoded('[1, {"a": null}]')
    assert decoded(json.dumps(json.dumps({"a": 1}))) == {"a": 1}
    for text in ("[not a list", "{}}", "plain", "", "(1, 2)", "[\\d]", "{'a\0'"):
        assert decoded(text) == text


def test_null_counts_as_absent() -> None:
    assert without_nulls({"a": None, "b": [{"c": None, "d": 0}]}) == {"b": [{"d": 0}]}
