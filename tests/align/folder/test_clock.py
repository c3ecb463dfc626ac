"""The clock and the random numbers of chat templates."""

from __future__ import annotations

import datetime
import random

import pytest

from align.folder.clock import draws_at_random, fixed, reads_clock, today
from align.folder.rendering import render
from align.rows.conversation import Conversation
from align.target.debug import debug_model


def write(template: str, seed: int = 0) -> str:
    tokenizer = debug_model("Llama")[1]
    tokenizer.chat_template = template
    return render(tokenizer, Conversation.from_text("Hi"), seed=seed)


@pytest.mark.parametrize("what", ["%Y", "%A", "%H", "%S", "%d %b %Y"])
def test_any_part_of_the_time_is_seen(what: str) -> None:
    template = f"{{{{ strftime_now('{what}') }}}}{{{{ messages[0].content }}}}"
    assert reads_clock(lambda: write(template)) and not draws_at_random(lambda seed: write(template, seed))


@pytest.mark.parametrize(
    "draw", ["{{ [1, 2, 3, 4] | random }}", "{{ lipsum(1) }}", "{{ ['a', 'b'] | random }}"]
)
def test_draws_are_seen_and_are_always_the_same(draw: str) -> None:
    template = draw + "{{ messages[0].content }}"
    assert draws_at_random(lambda seed: write(template, seed)) and not reads_clock(lambda: write(template))
    assert len({write(template) for _ in range(5)}) == 1


def test_outside_nothing_changes() -> None:
    assert not reads_clock(lambda: write("{{ messages[0].content }}"))
    random.seed(3)
    expected = random.random()
    random.seed(3)
    with fixed("2001-02-03"):
        from transformers.utils import chat_template_utils

        assert chat_template_utils.datetime.now().strftime("%d %b %Y %H") == "03 Feb 2001 12"
        random.random()
    assert random.random() == expected
    assert chat_template_utils.datetime is datetime.datetime and today() == f"{datetime.date.today()}"
