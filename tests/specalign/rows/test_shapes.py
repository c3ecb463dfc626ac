"""Rows of every shape as conversations; what a row leaves out is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specalign.rows.conversation import Conversation
from specalign.rows.messages import UnusableRow
from specalign.rows.shapes import ParsedRow, parse_row
from tests.row_shapes import GPT, HI, SHAPES, TALK, TOOL, UNUSABLE, assistant, system, user


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
    row = {
        "prompt": "Hi",
        "id": 1,
        "category": "c",
        "options": ["a"],
        "answer": "b",
        "note": None,
        "tag": "",
    }
    assert parse_row(row).columns == ["options", "answer"]
    assert parse_row({"prompt": TALK, "chosen": "x", "rejected": "y"}).columns == [
        "chosen",
        "rejected",
    ]
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


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("A?"), {"role": "asistant", "content": "a"}, user("B?")]},
        {
            "messages": [user("A?"), {"role": "asistant", "content": "a"}, user("B?")],
            "prompt": "B?",
        },
    ],
)
def test_a_row_with_a_misspelt_role_is_refused(row: Any) -> None:
    with pytest.raises(UnusableRow, match="an unknown role, 'asistant' .did you mean 'assistant'"):
        parse_row(row)


def contents(row: Any) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in parse_row(row).conversation.messages]


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "system", "content": None}, USER]}, [("user", "Hi")]),
        ({"prompt": "def f(x):\n    "}, [("user", "def f(x):\n    ")]),
        ({"messages": {"system": "S", "messages": [USER]}}, [("system", "S"), ("user", "Hi")]),
        (
            {"prompt": json.dumps({"system": "S", "messages": [USER]})},
            [("system", "S"), ("user", "Hi")],
        ),
        (
            {
                "conversation": [
                    {"instruction": "Translate", "input": "Good day", "output": "Bonjour"}
                ]
            },
            [("user", "Translate\n\nGood day"), ("assistant", "Bonjour")],
        ),
    ],
)
def test_nothing_of_a_row_is_lost(row: Any, expected: list[tuple[str, str]]) -> None:
    assert contents(row) == expected


def test_an_older_function_call_is_a_tool_call() -> None:
    answer = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": "{}"},
    }
    result = {"role": "function", "name": "f", "content": "12C"}
    messages = parse_row({"messages": [USER, answer, result]}).conversation.messages
    assert messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]
    assert messages[2]["role"] == "tool"


def test_an_object_in_a_chosen_column_is_a_row() -> None:
    """As in the batch files of OpenAI."""
    body = {"model": "m", "messages": HI, "tools": [TOOL], "system": "SYS"}
    parsed = parse_row({"custom_id": "1", "method": "POST", "body": body}, "body")
    assert parsed.conversation.messages == (system("SYS"), *HI) and parsed.conversation.tools == (
        TOOL,
    )
    assert parsed.columns == ["model", "custom_id", "method"]
    assert parse_row(
        {"body": {"prompt": "Hi there", "system": "S"}, "prompt": "x"}, "body"
    ) == ParsedRow(Conversation((system("S"), *HI)), ["prompt"])
    outer = parse_row({"body": {**body, "tools": []}, "tools": [TOOL], "system": "OUTER"}, "body")
    assert outer.conversation.tools == (TOOL,) and outer.columns == ["model", "system"]
    for talk in ({"human": "Hi there", "lang": "en"}, HI[0], {"type": "text", "text": "Hi there"}):
        assert list(parse_row({"body": talk}, "body").conversation.messages) == HI


def test_a_text_that_marks_its_turns_is_split() -> None:
    text = "\n\nHuman: A?\n\nAssistant: a\n\nb\n\nHuman: B?\n\nAssistant:"
    parsed = parse_row({"chosen": text + " c", "rejected": text}, "chosen")
    assert list(parsed.conversation.messages) == [
        user("A?"),
        assistant("a\n\nb"),
        user("B?"),
        assistant("c"),
    ]
    assert parsed.split and parsed.answered
    assert list(parse_row({"prompt": text}).conversation.messages)[-1] == user("B?")
    for other in ("\r\n\r\nHuman: A?\r\n\r\nAssistant: a", "### Human: A?### Assistant: a"):
        assert list(parse_row({"text": other}).conversation.messages) == [
            user("A?"),
            assistant("a"),
        ]
    pasted = "Human: hi\n\nAssistant: hello\n\nSummarise the above."
    assert list(parse_row({"prompt": pasted}).conversation.messages) == [user(pasted)]
    for other in (
        "Human: A?",
        "What does\n\nHuman: A\n\nAssistant: B\n\nmean?",
        "\n\nAssistant: a\n\nHuman: A?",
    ):
        parsed = parse_row({"prompt": other})
        assert list(parsed.conversation.messages) == [user(other)] and not parsed.split
