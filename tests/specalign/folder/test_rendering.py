"""Messages as people bring them become strings, or one line says what is wrong."""

import json
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.folder.rendering import TemplateRefusal, render
from specalign.lm.debug import debug_model
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import as_conversation


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "a conversation is a text or a list of messages"),
        ([3], "a conversation without a user's text"),
        ([{"content": "a"}], "a conversation with messages without a role"),
        ([{"role": "user", "contnet": "a"}], "without a user's text"),
    ],
)
def test_malformed_messages_are_refused_in_a_line(value: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        as_conversation(value)


def test_tools_reach_the_template_and_arguments_are_objects() -> None:
    tokenizer = debug_model("Llama")[1]
    tokenizer.chat_template = (
        "{{ tools | tojson if tools else 'none' }}|{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }};{% endfor %}"
    )
    tool = {"name": "w"}
    for arguments in ('{"a": 1}', {"a": 1}):
        call = {"type": "function", "function": {"name": "w", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        talk = Conversation(({"role": "user", "content": "Hi"}, said), (tool,))
        assert render(tokenizer, talk) == f'{json.dumps([tool])}|Hi;{{"a": 1}};'
    assert render(tokenizer, Conversation.from_text("Hi"), {"tools": [tool]}).startswith('[{"name"')
    assert render(tokenizer, Conversation.from_text("Hi")).startswith("none|")


def test_what_a_template_raises_is_its_reason() -> None:
    tokenizer = debug_model("Llama")[1]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateRefusal, match="template rejects this: roles") as found:
        render(tokenizer, Conversation.from_text("Hi"), spec="m")
    assert found.value.reason == "roles must alternate"
