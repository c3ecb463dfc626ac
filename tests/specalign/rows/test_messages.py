"""Messages in every spelling."""

from __future__ import annotations

import pytest

from specalign.rows.conversation import ROLES, Conversation
from specalign.rows.messages import (
    UnusableRow,
    decode_json,
    read_messages,
)


def test_roles_in_every_spelling() -> None:
    for role, spellings in ROLES.items():
        for word in spellings.split():
            for written in (word, word.upper(), f" {word.title()} ", word.replace("_", "-")):
                found = read_messages([{"role": written, "content": "x"}])
                assert found == [{"role": role, "content": "x"}]
    for written, hint in (("narrator", "$"), ("asistant", " .did you mean 'assistant'")):
        with pytest.raises(UnusableRow, match=f"an unknown role, '{written}'{hint}"):
            read_messages([{"role": written, "content": "x"}])


def test_what_a_string_holds() -> None:
    assert decode_json('[1, {"a": null}]') == [1, {"a": None}]
    for text in ("[not a list", "{}}", "plain", "", '"a"'):
        assert decode_json(text) == text


def test_prompt_drops_the_assistant_messages_at_the_end() -> None:
    user, answer = {"role": "user", "content": "A?"}, {"role": "assistant", "content": "a"}
    tools = ({"name": "search"},)
    talk = Conversation((user, answer, user, answer, answer), tools)
    assert talk.prompt == Conversation((user, answer, user), tools)
    assert talk.prompt.prompt == talk.prompt
    assert Conversation((answer,)).prompt.messages == ()
