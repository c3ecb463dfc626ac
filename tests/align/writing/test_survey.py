"""Prompts that are left out or cut are counted, with the key that changes it."""

from __future__ import annotations

import pytest

from align.config.parser import load_recipe
from align.writing.prompts import PromptReader
from align.writing.survey import survey_prompts
from align.writing.template import chat_template
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import as_conversation
from tests.chat_templates import talking


def notes(target: Target, prompts: list[Conversation], *words: str) -> list[str]:
    own = ["recipe=debug_block", "data.prompts=p.jsonl", *words]
    reader = PromptReader(load_recipe(own), target, chat_template(target))
    return survey_prompts(reader, prompts)[1]


def test_long_prompts_are_counted(target: Target) -> None:
    prompts = [as_conversation("x" * n) for n in (5, 50, 60, 40)]
    start = "data.prompts='p.jsonl': 2 of 4 prompts are longer than data.max_prompt_tokens=40 and "
    said = notes(target, prompts)
    assert said[0].startswith(f"{start}left out") and "data.max_prompt_tokens=60 keeps" in said[0]
    assert notes(target, prompts, "data.long_prompts=cut")[0].startswith(f"{start}cut;")
    assert notes(target, prompts[:1]) == []
    with pytest.raises(UserError, match="no prompt is usable: 2 of 2 prompts are longer"):
        notes(target, prompts[1:3])


def test_prompts_beyond_the_samples_and_without_room_are_counted(target: Target) -> None:
    prompts = [as_conversation("x" * n) for n in range(1, 43)]
    assert "takes the first 6 of 42" in notes(target, prompts, "data.samples=6")[0]
    said = notes(target, [as_conversation("x" * 70)], "data.max_prompt_tokens=70")
    assert len(said) == 1
    assert "1 of 1 prompts leave no room" in said[0] and "data.length=113 holds" in said[0]


def test_refused_conversations_are_counted() -> None:
    target = talking("byte-level", "gemma")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    refused = as_conversation(messages)
    said = notes(target, [as_conversation("a"), refused])
    reason = "refuses 1 of 2 prompts, which are left out: System role not supported"
    assert len(said) == 1 and reason in said[0]
    with pytest.raises(UserError, match="no prompt is usable: .*System role not supported"):
        notes(target, [refused])


def test_text_with_a_template_applied_is_counted(target: Target) -> None:
    said = notes(target, [as_conversation("<|im_start|>user\nhi<|im_end|>"), as_conversation("hi")])
    assert len(said) == 1 and "1 of 2 prompts hold special tokens (<|im_start|>)" in said[0]
