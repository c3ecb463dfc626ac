"""Given conversations: kept whole, left out, or cut so that the question stays."""

import pytest

from align.config.parser import load_recipe
from align.writing.prompts import TOO_LONG, Dropped, PromptReader
from align.writing.template import chat_template
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import as_conversation
from tests.builders import switching_target

ARTICLE = "word " * 60 + "\n\nQuestion: which year?"


def reader(target: Target, *words: str) -> PromptReader:
    own = ["recipe=debug_block", "data.prompts=p.jsonl", *words]
    if not any(word.startswith("data.max_prompt") for word in words):
        own.append("data.max_prompt_tokens=80")
    return PromptReader(load_recipe(own), target, chat_template(target))


def talk(*messages: tuple[str, str], tools: tuple[dict[str, object], ...] = ()) -> Conversation:
    return Conversation(
        tuple({"role": role, "content": content} for role, content in messages), tools
    )


def test_the_oldest_turns_of_a_conversation_are_cut(target: Target) -> None:
    whole = talk(
        ("system", "Be brief."), ("user", "a" * 30), ("assistant", "b" * 60), ("user", "Why?")
    )
    cut, _ = reader(target, "data.long_prompts=cut").read(whole)
    assert [m["content"] for m in cut.messages] == ["Be brief.", "Why?"]
    for long in (as_conversation(ARTICLE), talk(("system", ARTICLE), ("user", "Why?"))):
        with pytest.raises(Dropped, match=TOO_LONG):
            reader(target, "data.long_prompts=cut").read(long)


def test_a_base_model_goes_on_from_the_first_tokens_of_a_text(target: Target) -> None:
    base = switching_target()
    base.tokenizer.chat_template = None
    _, ids = reader(base, "data.long_prompts=cut").read(as_conversation(ARTICLE))
    assert ids == base.chat_tokens(ARTICLE)[:81]
    with pytest.raises(Dropped, match=TOO_LONG):
        reader(base).read(as_conversation(ARTICLE))
