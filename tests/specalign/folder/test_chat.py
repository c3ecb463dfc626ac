"""Template switches and system prompts: read, checked against what the template reads, written into titles and commands."""

from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.folder.chat import Chat, find_variables, merge_kwargs, read_kwargs
from specalign.folder.rendering import render
from specalign.lm.debug import debug_model
from specalign.rows.shapes import as_conversation
from tests.builders import SWITCHES


@pytest.fixture
def tokenizer() -> Any:
    found = debug_model("Llama")[1]
    found.chat_template = SWITCHES
    return found


def test_values_are_json_where_they_are_that() -> None:
    assert read_kwargs("enable_thinking=false") == {"enable_thinking": False}
    assert read_kwargs("effort=low") == {"effort": "low"} and read_kwargs("a=b=c") == {"a": "b=c"}
    assert read_kwargs('{"a": [1], "b": null}') == {"a": [1], "b": None}
    assert read_kwargs("thinking=False") == {"thinking": False}
    assert merge_kwargs([{"a": 1}, {"b": 2}]) == {"a": 1, "b": 2}
    for text, says in (
        ("thinking", "is not key=value"),
        ("a b=1", "is not key=value"),
        ("{oops", "is not a JSON object"),
    ):
        with pytest.raises(UserError, match=says):
            read_kwargs(text)
    with pytest.raises(UserError, match="--template-kwargs: a is given twice"):
        merge_kwargs([{"a": 1}, {"a": 2}])


def test_the_variables_that_a_template_reads(tokenizer: Any) -> None:
    """Without those that every template is given: messages, special tokens, jinja's own."""
    assert find_variables(tokenizer, "mine") == ["enable_thinking", "tools"]
    tokenizer.chat_template = (
        "{{ bos_token }}{% for i in range(2) %}{{ raise_exception }}{% break %}{% endfor %}"
    )
    assert find_variables(tokenizer, "mine") == []
    tokenizer.chat_template = "{% for"
    with pytest.raises(UserError, match="target 'mine': its chat template can't be read"):
        find_variables(tokenizer, "mine")


def test_what_a_template_does_not_read_is_refused(tokenizer: Any) -> None:
    Chat({"enable_thinking": False, "tools": [{"name": "f"}]}, "Be brief.").check(tokenizer, "mine")
    says = "the chat template of target 'mine' has no variable 'enable_thinkin'"
    with pytest.raises(UserError, match=f"{says} .did you mean 'enable_thinking'"):
        Chat({"enable_thinkin": False}).check(tokenizer, "mine")
    for name in ("messages", "tokenize", "eos_token", "chat_template"):
        with pytest.raises(UserError, match=f"no variable '{name}'"):
            Chat({name: 1}).check(tokenizer, "mine")
    tokenizer.chat_template = None
    Chat(system="joined with the prompt").check(tokenizer, "mine")
    with pytest.raises(UserError, match="template_kwargs: target 'mine' has no chat template"):
        Chat({"a": 1}).check(tokenizer, "mine")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
            "system: the chat template of target 'mine' rejects a system prompt: System role not supported",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "ignores the system prompt",
        ),
    ],
)
def test_a_template_without_a_system_role_says_so(tokenizer: Any, template: str, says: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=says):
        Chat(system="Be brief.").check(tokenizer, "mine")


def test_a_conversation_keeps_its_own_system_prompt(tokenizer: Any) -> None:
    chat, talk = Chat({"enable_thinking": False}, ""), as_conversation("Hi")
    assert chat.apply(talk).messages == ({"role": "system", "content": ""}, *talk.messages)
    for role in ("system", "developer"):
        own = as_conversation([{"role": role, "content": "Mine."}, *talk.messages])
        assert chat.apply(own) == own
    assert Chat().apply(talk) == talk and not Chat() and chat
    assert render(tokenizer, talk, chat.kwargs) == render(tokenizer, talk) + "<none>"


def test_a_template_of_parts_gets_parts(tokenizer: Any) -> None:
    """As those of models that see images ask for them; it would leave a plain text out without a word."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
        "{% endif %}{% endfor %};{% endfor %}"
    )
    talk = as_conversation(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert render(tokenizer, talk) == "system:Be brief.;user:Hi;"
    Chat(system="Be brief.").check(tokenizer, "mine")
    tokenizer.chat_template = "{{ messages[-1].content.upper() }}"  # which a list does not have
    assert render(tokenizer, talk) == "HI"
