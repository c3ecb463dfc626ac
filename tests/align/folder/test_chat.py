"""Template switches and system prompts: read, checked against what the template reads, written into titles and commands."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from align.common.errors import UserError
from align.folder.chat import Chat, merged, read_kwargs, rendered, typed, variables
from align.target.debug import debug_model
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
    assert merged([{"a": 1}, {"b": 2}]) == {"a": 1, "b": 2}
    for text, says in (
        ("thinking", "is not key=value"),
        ("a b=1", "is not key=value"),
        ("{oops", "is no JSON object"),
        ("thinking=False", "False is text here .did you mean 'false'"),
        ("x=None", "did you mean 'null'"),
    ):
        with pytest.raises(UserError, match=says):
            read_kwargs(text)
    with pytest.raises(UserError, match="--template-kwargs: a is given twice"):
        merged([{"a": 1}, {"a": 2}])


def test_the_variables_that_a_template_reads(tokenizer: Any) -> None:
    """Without those that every template is given: messages, special tokens, jinja's own."""
    assert variables(tokenizer, "mine") == ["enable_thinking", "tools"]
    tokenizer.chat_template = (
        "{{ bos_token }}{% for i in range(2) %}{{ raise_exception }}{% break %}{% endfor %}"
    )
    assert variables(tokenizer, "mine") == []
    tokenizer.chat_template = "{% for"
    with pytest.raises(UserError, match="target 'mine': its chat template can't be read"):
        variables(tokenizer, "mine")


def test_what_a_template_does_not_read_is_refused(tokenizer: Any) -> None:
    Chat({"enable_thinking": False, "tools": [{"name": "f"}]}, "Be brief.").check(tokenizer, "mine")
    says = (
        "the chat template of target 'mine' has no switch 'enable_thinkin': it reads enable_thinking, tools"
    )
    with pytest.raises(UserError, match=f"{says} .did you mean 'enable_thinking'"):
        Chat({"enable_thinkin": False}).check(tokenizer, "mine")
    for name in ("messages", "tokenize", "eos_token"):
        with pytest.raises(UserError, match=f"no switch '{name}'"):
            Chat({name: 1}).check(tokenizer, "mine")
    for value in ({1}, float("nan")):
        with pytest.raises(UserError, match="enable_thinking=.* is no JSON value"):
            Chat({"enable_thinking": value}).check(tokenizer, "mine")
    tokenizer.chat_template = None
    Chat(system="joined with the prompt").check(tokenizer, "mine")
    with pytest.raises(UserError, match="template_kwargs: target 'mine' has no chat template"):
        Chat({"a": 1}).check(tokenizer, "mine")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
            "system: the chat template of target 'mine' takes no system prompt: System role not supported",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves a system prompt out",
        ),
    ],
)
def test_a_template_without_a_system_role_says_so(tokenizer: Any, template: str, says: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=says):
        Chat(system="Be brief.").check(tokenizer, "mine")
    with pytest.raises(UserError, match="system: not valid Unicode at character 1"):
        Chat(system="a\ud800").check(tokenizer, "mine")


def test_a_conversation_keeps_its_own_system_prompt(tokenizer: Any) -> None:
    chat, talk = Chat({"enable_thinking": False}, ""), [{"role": "user", "content": "Hi"}]
    assert chat.messages("Hi") == [{"role": "system", "content": ""}, *talk]
    for role in ("system", "developer"):
        own = [{"role": role, "content": "Mine."}, *talk]
        assert chat.messages(own) == own
    assert Chat().messages(talk) == talk and not Chat() and chat
    assert rendered(tokenizer, talk, chat.kwargs) == rendered(tokenizer, talk) + "<none>"


def test_a_template_of_parts_gets_parts(tokenizer: Any) -> None:
    """As those of models that see images ask for them; it would leave a plain text out without a word."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
        "{% endif %}{% endfor %};{% endfor %}"
    )
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert rendered(tokenizer, talk) == "system:Be brief.;user:Hi;"
    Chat(system="Be brief.").check(tokenizer, "mine")
    tokenizer.chat_template = "{{ messages[-1].content.upper() }}"  # which a list does not have
    assert rendered(tokenizer, talk) == "HI"


@pytest.mark.parametrize("value", [False, 3, "low", "false", "a b", None, [1, {"b": "c"}]])
def test_words_are_read_back(value: Any) -> None:
    chat = Chat({"x": value}, "Be\nbrief.")
    words = shlex.split(typed(chat.words))
    assert [words[0], *words[2:]] == ["--template-kwargs", "--system", "Be\nbrief."]
    assert read_kwargs(words[1]) == {"x": value}


def test_titles() -> None:
    assert (
        Chat({"enable_thinking": False}, "Be brief.").said
        == 'enable_thinking=false · system prompt "Be brief."'
    )
    assert Chat().said == "" and typed(()) == ""
