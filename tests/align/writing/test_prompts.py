"""Given conversations: kept whole, left out, or cut so that the question stays."""

from __future__ import annotations

import pytest

from align.config.parser import load_recipe
from align.writing.prompts import REFUSED, TOO_LONG, PromptReader
from align.writing.template import chat_template
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import as_conversation
from tests.builders import switching_target
from tests.chat_templates import talking

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


def test_a_long_prompt_is_left_out_or_cut_at_its_start(target: Target) -> None:
    conversation = as_conversation(ARTICLE)
    left_out = reader(target).read(conversation)
    assert left_out.broken == TOO_LONG and not left_out.ids
    cut = reader(target, "data.long_prompts=cut").read(conversation)
    text = cut.conversation.messages[0]["content"]
    assert ARTICLE.endswith(text) and text.startswith("word") and 75 <= len(text) <= 80
    assert cut.ids == target.chat_tokens(text) and not cut.broken


def test_of_a_conversation_the_oldest_turns_go_first_and_the_system_prompt_stays(
    target: Target,
) -> None:
    whole = talk(
        ("system", "Be brief."), ("user", "a" * 30), ("assistant", "b" * 60), ("user", "Why?")
    )
    cut = reader(target, "data.long_prompts=cut").read(whole)
    assert [m["content"] for m in cut.conversation.messages] == ["Be brief.", "Why?"]
    long = talk(("system", "x" * 50 + " y"), ("user", "z " * 60 + "the end?"))
    cut = reader(target, "data.long_prompts=cut").read(long)
    texts = [m["content"] for m in cut.conversation.messages]
    assert texts[1].endswith("the end?") and not cut.broken


def test_a_base_model_goes_on_from_the_first_tokens_of_a_text(target: Target) -> None:
    base = switching_target()
    base.tokenizer.chat_template = None
    cut = reader(base, "data.long_prompts=cut").read(as_conversation(ARTICLE))
    assert cut.ids == base.chat_tokens(ARTICLE)[:81] and not cut.broken
    assert reader(base).read(as_conversation(ARTICLE)).broken == TOO_LONG


def test_refused_and_changed_conversations_are_reported(
    capsys: pytest.CaptureFixture[str], target: Target
) -> None:
    read = reader(talking("byte-level", "gemma"), "data.max_prompt_tokens=200")
    assert read.read(talk(("system", "s"), ("user", "a"))).broken == REFUSED
    assert "System role not supported" in capsys.readouterr().err


def test_the_first_user_text_begins_behind_what_conversations_share(target: Target) -> None:
    read = reader(target, "data.max_prompt_tokens=200")
    for lead in ((), (("system", "You are the one. " * 5),)):
        prompt = read.read(talk(*lead, ("user", "Hello?")))
        rest = target.tokenizer.decode(prompt.ids[read.text_start(prompt) :])
        assert rest.startswith("Hello?<|im_end|>")
    prompt = read.read(talk(("user", "Hello?"), tools=({"name": "f"},)))
    rest = target.tokenizer.decode(prompt.ids[read.text_start(prompt) :])
    assert rest.startswith("Hello?<|im_end|>")
