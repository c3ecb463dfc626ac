"""What is left out or cut is counted, and said with the key that changes it."""

from __future__ import annotations

import pytest

from align.config.parser import load_recipe
from align.writing.prompts import PromptReader
from align.writing.survey import describe_survey, survey_prompts
from align.writing.template import chat_template
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import as_conversation
from tests.chat_templates import talking


def notes(target: Target, prompts: list[Conversation], *words: str) -> list[str]:
    own = ["recipe=debug_block", "data.prompts=p.jsonl", *words]
    reader = PromptReader(load_recipe(own), target, chat_template(target))
    return describe_survey(reader, survey_prompts(reader, prompts), len(prompts))


def test_long_prompts_are_counted_with_the_key_that_keeps_them(target: Target) -> None:
    prompts = [as_conversation("x" * n) for n in (5, 50, 60, 40)]
    start = "data.prompts='p.jsonl': 2 of 4 prompts are longer than data.max_prompt_tokens=40 and "
    assert (
        notes(target, prompts)[0]
        == f"{start}left out; data.max_prompt_tokens=60 keeps all, data.long_prompts=cut shortens them"
    )
    said = notes(target, prompts, "data.long_prompts=cut")[0]
    assert said.startswith(
        f"{start}cut (the oldest turns, then the start of the longest message); "
    )
    assert "data.max_prompt_tokens=60 keeps all" in said
    assert notes(target, prompts[:1]) == []
    with pytest.raises(
        UserError,
        match="no prompt fits .2 of 2 prompts are longer .*=40.; data.max_prompt_tokens=60 keeps",
    ):
        notes(target, prompts[1:3])
    far = as_conversation("x" * 2000)
    assert (
        "keeps all that the target's context of 512 tokens holds"
        in notes(target, [*prompts, far])[0]
    )
    some = notes(target, [as_conversation("x" * 50)] + prompts[:1] * 9, "data.samples=3")
    assert "1 of the first 4 prompts are longer" in some[1]


def test_prompts_beyond_the_wanted_samples_are_counted(target: Target) -> None:
    prompts = [as_conversation("x" * n) for n in range(1, 43)]
    said = (
        "data.prompts='p.jsonl': data.samples=6 takes the first 6 of 42 prompts, in their order; "
    )
    assert notes(target, prompts, "data.samples=6") == [f"{said}data.samples=42 takes all"]
    assert notes(target, prompts[:40], "data.samples=40") == []


def test_prompts_that_leave_no_room_for_an_answer_in_a_row(target: Target) -> None:
    said = notes(target, [as_conversation("x" * 70)], "data.max_prompt_tokens=70")
    assert (
        len(said) == 1
        and "1 of 1 prompts leave no room" in said[0]
        and "data.length=113 holds" in said[0]
    )


def test_refused_conversations_are_counted_and_all_of_them_end_the_run() -> None:
    target = talking("byte-level", "gemma")
    refused = as_conversation(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    )
    said = notes(target, [as_conversation("a"), refused])
    assert (
        len(said) == 1
        and "refuses 1 of 2 prompts, which are left out: System role not supported" in said[0]
    )
    with pytest.raises(UserError, match="refuses every prompt: System role not supported"):
        notes(target, [refused])


def test_messages_that_the_template_leaves_out_are_counted(target: Target) -> None:
    user = {"role": "user", "content": "Hi"}
    talks = [
        as_conversation([{"role": role, "content": "S"}, user]) for role in ("system", "developer")
    ]
    template = "{% for m in messages %}{% if m.role != 'developer' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    made = load_target("debug")
    made.tokenizer.chat_template = template
    said = notes(made, talks)
    assert len(said) == 1 and "leaves out the developer messages of 1 of 2 prompts" in said[0]
    assert notes(target, talks) == []


def test_text_that_went_through_a_template_is_named(target: Target) -> None:
    said = notes(target, [as_conversation("<|im_start|>user\nhi<|im_end|>"), as_conversation("hi")])
    assert len(said) == 1 and "1 of 2 prompts hold special tokens (<|im_start|>)" in said[0]
