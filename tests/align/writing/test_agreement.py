"""Greedy answers tell whose they are."""

from __future__ import annotations

import pytest

from align.config.parser import load_recipe
from align.writing.agreement import check_answers, make_probes
from align.writing.rows import Plan
from align.writing.template import chat_template
from decode.engine.decoder import Decoder
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target


def test_another_models_answers_are_refused(target: Target) -> None:
    plan = Plan(load_recipe(["recipe=debug_block"]), target, chat_template(target), None)
    prompts = make_probes(plan)[:4]

    def answers(model: Target) -> list[list[int]]:
        return [Decoder(model).generate(p, max_new_tokens=12).tokens for p in prompts]

    assert check_answers(target, prompts, answers(target), "it") == 1.0
    other = answers(load_target("debug-qwen2"))
    with pytest.raises(UserError, match="it is not target.name='debug': the target would choose"):
        check_answers(target, prompts, other, "it")
    assert check_answers(target, prompts, [[]] * 4, "it") == 1.0
