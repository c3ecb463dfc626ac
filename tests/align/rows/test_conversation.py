from __future__ import annotations

from align.rows.conversation import Conversation


def test_prompt_drops_the_assistant_messages_at_the_end() -> None:
    user, answer = {"role": "user", "content": "A?"}, {"role": "assistant", "content": "a"}
    tools = ({"name": "search"},)
    talk = Conversation((user, answer, user, answer, answer), tools)
    assert talk.prompt == Conversation((user, answer, user), tools)
    assert talk.prompt.prompt == talk.prompt
    assert Conversation((answer,)).prompt.messages == ()


def test_text_is_one_user_message() -> None:
    assert Conversation.from_text("Hi").messages == ({"role": "user", "content": "Hi"},)
