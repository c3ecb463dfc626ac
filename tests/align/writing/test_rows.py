"""What a batch begins with depends on its number and the recipe alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from align.config.parser import load_recipe
from align.writing.rows import Plan
from align.writing.template import chat_template
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from tests.builders import switching_target


def test_rows_of_given_prompts_end_with_the_last_one(target: Target) -> None:
    words = ["recipe=debug_block", "data.batch_size=4", "data.max_prompt_tokens=3"]
    words.append("data.prompts=p.jsonl")
    texts = [Conversation.from_text(text) for text in ("abcdef", "b", "c", "d", "e")]
    plan = Plan(load_recipe(words), target, chat_template(target), texts)
    first, second = plan.rows(0), plan.rows(1)
    assert [row.index for row in (*first, *second)] == [0, 1, 2, 3, 4] and plan.rows(2) == []
    assert first[0].done and first[0].broken == "prompt too long"
    assert first[1].forced == target.chat_tokens("b")
    assert [row.answer_temperature for row in first] == [0.0, 0.0, 0.7, 1.0]
    assert plan.prompt_ends >= {plan.template.turn[0], *target.eos_ids}
    assert plan.capacity == len(plan.template.prefix) + 3 + len(plan.template.turn) + 24


def test_a_prompt_of_tokens_that_the_target_has_not_is_named() -> None:
    target = switching_target()
    recipe = load_recipe(["recipe=debug_block"])
    target.tokenizer.chat_template = "{% for m in messages %}A{{ m.content }}{% endfor %}"
    told = SimpleNamespace(
        spec="m",
        tokenizer=target.tokenizer,
        chat=target.chat,
        has_chat_template=True,
        vocab_size=90,
        context_limit=512,
    )
    plan = Plan(
        recipe, told, chat_template(target), [Conversation.from_text(t) for t in ("a", "tz")]
    )  # type: ignore[arg-type]
    with pytest.raises(
        UserError,
        match="data.prompts, prompt 2: target 'm': its tokenizer knows 'z' as token 93, .* 90 rows",
    ):
        plan.rows(0)
