"""What a chat template leaves out of a conversation."""

from __future__ import annotations

import pytest

from specalign.folder.ignored import find_ignored
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from tests.builders import switching_target
from tests.row_shapes import CALL, TOOL, assistant, system, tool, user

WHOLE = Conversation(
    (
        system("S"),
        user("A"),
        {**assistant("b"), "tool_calls": [CALL], "reasoning_content": "r"},
        tool("12C"),
        user("C"),
    ),
    (TOOL,),
)
EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def with_template(template: str | None) -> Target:
    target = switching_target()
    target.tokenizer.chat_template = template
    return target


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (EACH, {"tool calls", "reasoning", "tools"}),
        (None, {"tool calls", "reasoning", "tools"}),
        (EACH + "{{ tools }}{{ messages }}", set()),
        (
            "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}",
            {"system messages", "tool messages", "tool calls", "reasoning", "tools"},
        ),
        (
            "{{ messages[-1].content }}{{ tools }}",
            {"system messages", "assistant messages", "tool messages", "tool calls", "reasoning", "earlier user messages"},
        ),
    ],
)  # fmt: skip
def test_every_part_that_changes_nothing_is_found(template: str | None, parts: set[str]) -> None:
    assert {*find_ignored(with_template(template), WHOLE)} == parts


def test_a_conversation_without_such_parts() -> None:
    target = with_template(EACH)
    assert find_ignored(target, Conversation.from_text("Hi")) == ()
    assert find_ignored(target, Conversation((user("A"), assistant("b"), user("C")))) == ()
