"""Rows of every shape as conversations; what a row leaves out is named."""

import pytest

from specalign.rows.conversation import UnusableRow
from specalign.rows.shapes import parse_row
from tests.row_shapes import GPT, HI, SHAPES, TALK, TOOL, UNUSABLE, user


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_is_the_whole_conversation(name: str) -> None:
    row, messages = SHAPES[name]
    conversation = parse_row(row).conversation
    assert list(conversation.messages) == messages
    declared = isinstance(row, dict) and bool(row.get("tools"))
    assert conversation.tools == ((TOOL,) if declared else ())


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_row_without_a_conversation_says_why(name: str) -> None:
    row, why = UNUSABLE[name]
    with pytest.raises(UnusableRow) as error:
        parse_row(row)
    assert str(error.value) == why


def test_what_a_row_does_not_use_is_named() -> None:
    """The columns that name a prompt, and those that are null or empty, are nothing to name."""
    row = {"prompt": "Hi", "id": 1, "category": "c", "note": None, "tag": ""}
    assert parse_row({**row, "options": ["a"], "answer": "b"}).columns == ["options", "answer"]
    pair = parse_row({"prompt": TALK, "chosen": "x", "rejected": "y"})
    assert pair.columns == ["chosen", "rejected"]
    assert parse_row({"question": "Q", "context": {"sentences": ["s"]}}).columns == ["context"]
    assert parse_row({"system": "T", "messages": TALK}).columns == ["system"]
    assert parse_row({"prompt": "Hi", "tools": "none"}).columns == ["tools"]
    assert parse_row({"turns": ["a", "b", "c"]}).later_turns == 2
    assert parse_row({"conversations": GPT[:2]}).answered
    assert parse_row({"instruction": "I", "input": "x", "output": "y"}).columns == ["output"]


def test_a_chosen_column_is_the_only_text() -> None:
    row = {"instruction": "I", "input": "x", "conversations": GPT[:1], "system": "S"}
    parsed = parse_row(row, "instruction")
    assert list(parsed.conversation.messages) == [{"role": "system", "content": "S"}, user("I")]
    assert parsed.columns == ["input", "conversations"]
    assert list(parse_row({"body": HI}, "body").conversation.messages) == HI
    with pytest.raises(UnusableRow, match="without a user's text"):
        parse_row({"prompt": "Hi"}, "body")


def test_a_row_with_a_misspelt_role_is_refused() -> None:
    messages = [user("A?"), {"role": "asistant", "content": "a"}, user("B?")]
    with pytest.raises(UnusableRow, match="an unknown role, 'asistant'"):
        parse_row({"messages": messages, "prompt": "B?"})
