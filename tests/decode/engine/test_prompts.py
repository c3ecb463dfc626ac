"""Prompts of the Python API: text, conversations with parts and tools, tokens in every form; and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from decode.engine.decoder import Decoder
from decode.engine.prompts import prompt_tokens
from specalign.common.errors import UserError
from specalign.common.text import say_once
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import parse_row
from tests.row_shapes import SHAPES

TEMPLATE = (
    "{% if tools %}{% for t in tools %}<{{ t.function.name }}: {{ t.function.description }}>{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}{% endfor %}{% endfor %}[assistant]"
)
FUNCTION = {"name": "weather", "description": "Look it up."}
FUNCTION |= {"parameters": {"type": "object", "properties": {}}}  # type: ignore[dict-item]
WEATHER = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def weather(city: str) -> str:
    """Look it up.

    Args:
        city: where.
    """
    return city


@pytest.fixture(scope="module")
def talking() -> Target:
    """A target whose template writes everything that it is given."""
    target = load_target("debug", "float32", "cpu", fast=False)
    target.tokenizer.chat_template = TEMPLATE
    target.context_limit = 2000
    return target


def read(target: Target, prompt: Any, tools: Any = None) -> str:
    return str(target.tokenizer.decode(prompt_tokens(target, prompt, tools=tools)))


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}], "[user]A\nB"),
        (({"role": "user", "content": "A"},), "[user]A"),
        ([{"role": "user", "content": "A"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
          {"role": "tool", "content": "12C", "tool_call_id": "1"}], "[user]A[assistant]!weather[tool]12C"),
        ([{"role": "user", "content": "A"}, {"role": "assistant", "tool_calls": [CALL]}], "[user]A[assistant]!weather"),
        ([{"role": "user", "content": "A"}, {"role": "assistant", "content": "b", "reasoning_content": "why"}],
         "[user]A[assistant](why)b"),
        (Conversation(({"role": "user", "content": "A"},), (WEATHER,)), "<weather: Look it up.>[user]A"),
    ],
)  # fmt: skip
def test_messages_reach_the_chat_template(talking: Target, messages: Any, text: str) -> None:
    assert read(talking, messages) == text + "[assistant]"


@pytest.mark.parametrize("tools", [[WEATHER], (weather,)])
@pytest.mark.parametrize("prompt", ["A", [{"role": "user", "content": "A"}]])
def test_tools_reach_the_chat_template(talking: Target, prompt: Any, tools: Any) -> None:
    assert read(talking, prompt, tools) == "<weather: Look it up.>[user]A[assistant]"
    assert read(talking, prompt, [WEATHER, *tools]).count("<weather: Look it up.>") == 2
    with_tools, without = (Decoder(talking).generate(prompt, 1, tools=x) for x in (tools, None))
    assert with_tools.prompt_tokens > without.prompt_tokens
    assert read(talking, prompt, []) == "[user]A[assistant]"


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_take_every_shape_that_training_reads(name: str, talking: Target) -> None:
    row, messages = SHAPES[name]
    if isinstance(row, str):
        row = messages
    expected = Conversation(tuple(messages), parse_row(row).conversation.tools)
    assert prompt_tokens(talking, row) == talking.chat_tokens(expected)


def test_unused_keys_are_noted(talking: Target, capsys: pytest.CaptureFixture[str]) -> None:
    say_once.cache_clear()
    user = {"role": "user", "content": "A"}
    for _ in range(2):
        read(talking, {"messages": [user], "answer_key": "x"})
        read(talking, [user, {"role": "assistant", "content": "b"}])
        read(talking, {"turns": ["A", "B"]})
    notes = capsys.readouterr().err.splitlines()
    assert "note: unused keys in prompts: answer_key" in notes
    assert sum("the target answers in a new turn" in note for note in notes) == 1
    assert len(notes) == len({*notes}) == 3


def test_unused_tools_are_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target("debug", "float32", "cpu", fast=False)
    target.spec = "without tools"
    for _ in range(2):
        assert prompt_tokens(target, "A", tools=[WEATHER]) == prompt_tokens(target, "A")
    note = "note: the chat template of target 'without tools' does not use tools: a prompt's are ignored"
    assert capsys.readouterr().err.splitlines() == [note]


@pytest.mark.parametrize(
    "prompt",
    [
        (4, 90, 17),
        np.array([4, 90, 17]),
        torch.tensor([[4, 90, 17]]),
        BatchEncoding({"input_ids": torch.tensor([[4, 90, 17]])}),
        {"input_ids": [4, 90, 17], "attention_mask": [1, 1, 1]},
    ],
)
def test_tokens_in_every_form(talking: Target, prompt: Any) -> None:
    tokens = prompt_tokens(talking, prompt)
    assert tokens == [4, 90, 17] and {type(token) for token in tokens} == {int}
    assert prompt_tokens(talking, range(4, 7)) == [4, 5, 6]


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ({"role": "assistant", "content": "A"}, "a conversation without a user's text"),
        ([{"role": "asistant", "content": "A"}], "unknown role, 'asistant'"),
        ({"a": 1}, "must be text, messages or tokens"),
        (b"abc", "one row of tokens"),
        (torch.tensor([[1, 2], [3, 4]]), "one row of tokens"),
        ([True], "one row of tokens"),
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "attention_mask has zeros"),
    ],
)
def test_malformed_prompts(talking: Target, prompt: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        prompt_tokens(talking, prompt)


@pytest.mark.parametrize(
    ("prompt", "tools", "line"),
    [
        ([1, 2], [WEATHER], "tools need a string or messages"),
        ("A", WEATHER, "tools must be a list"),
        ("A", ["weather"], "a tool is a JSON schema or a function"),
        ("A", [lambda city: city], "can't derive a JSON schema"),
        ({"prompt": "A", "tools": [WEATHER]}, [WEATHER], "declares its own"),
    ],
)
def test_malformed_tools(talking: Target, prompt: Any, tools: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        prompt_tokens(talking, prompt, tools=tools)


def test_what_needs_the_chat_template_is_refused_for_raw_prompts(talking: Target) -> None:
    with pytest.raises(UserError, match="raw=True continues a string"):
        prompt_tokens(talking, [{"role": "user", "content": "A"}], raw=True)
    with pytest.raises(UserError, match="raw=True continues a string"):
        prompt_tokens(talking, "A", raw=True, tools=[WEATHER])
