"""Messages in every spelling."""

import pytest

from specalign.rows.conversation import (
    ROLES,
    Conversation,
    UnusableRow,
    decode_json,
    is_message,
    read_messages,
    read_text_parts,
)


def test_roles_in_every_spelling() -> None:
    for role, spellings in ROLES.items():
        for name in spellings.split():
            for written in (name, name.upper(), f" {name.title()} ", name.replace("_", "-")):
                found = read_messages([{"role": written, "content": "x"}])
                assert found == [{"role": role, "content": "x"}]
    with pytest.raises(UnusableRow, match="an unknown role, 'narrator'$"):
        read_messages([{"role": "narrator", "content": "x"}])


def test_content_is_always_a_string() -> None:
    part = {"type": "text", "text": "a"}
    texts = [read_text_parts(content) for content in (None, "a", part, [part, "b", None])]
    assert texts == ["", "a", "a", "a\nb"]
    for content in (3, [3], [{"type": "image"}], [{"image": "x"}]):
        with pytest.raises(UnusableRow, match="not text"):
            read_text_parts(content)


def test_a_message_has_no_other_columns() -> None:
    """The row of a table may have a role too."""
    message = {"role": "user", "content": "x"}
    assert is_message({**message, "weight": 1}) and is_message({"from": "a", "value": "x"})
    assert not is_message({**message, "message_id": 1}) and not is_message({"a": "x"})


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
