"""A batch in this process is the same whoever asked for which batch before."""

from __future__ import annotations

from align.config.parser import load_recipe
from align.target.model import Target
from align.writing.in_process import InProcess
from align.writing.rows import Plan, unheard
from align.writing.template import chat_template


def test_a_batch_depends_on_its_number_alone(target: Target) -> None:
    recipe = load_recipe(["recipe=debug_block", "data.batch_size=4", "data.max_answer_tokens=5"])
    source = InProcess(Plan(recipe, target, chat_template(target), None), target)
    first, second = source.write(0, 8, unheard), source.write(1, 4, unheard)
    assert source.write(0, 8, unheard) == first and first != second
    given = InProcess(Plan(recipe, target, chat_template(target), ["a"]), target)
    assert given.write(1, 1, unheard) is None
