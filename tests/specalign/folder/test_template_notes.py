"""Chat templates that write the date, or draw at random."""

import datetime
import random
from typing import Any

import pytest

from specalign.common.text import say_once
from specalign.folder.chat import Chat, draws_at_random, note_readings, reads_clock, today
from specalign.folder.rendering import render
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from tests.builders import switching_target

TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"
DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ date_string }}"
)


def with_template(template: str | None, **kwargs: Any) -> Target:
    say_once.cache_clear()
    target = switching_target()
    target.tokenizer.chat_template = template
    target.chat = Chat(kwargs)
    return target


def test_the_date_is_read_fixed_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert not reads_clock(with_template(TEXT)) and not reads_clock(with_template(None))
    given = with_template(DATED + TEXT, date_string="26 Jul 2024")
    assert not reads_clock(given)
    assert given.tokenizer.decode(given.chat_tokens("Hi")) == "26 Jul 2024Hi"
    target = with_template(DATED + TEXT)
    assert reads_clock(target) and target.chat_tokens("Hi") == target.chat_tokens("Hi")
    assert capsys.readouterr().err.count("today's date (its variable date_string sets it)") == 1
    note_readings(target, "data", "2001-02-03")
    assert "the samples of data use 03 Feb 2001" in capsys.readouterr().err
    hello = Conversation.from_text("Hi")
    assert render(target.tokenizer, hello, date="2001-02-03") == "03 Feb 2001Hi"
    assert render(target.tokenizer, hello) == f"{datetime.date.today():%d %b %Y}Hi"
    assert today() == f"{datetime.date.today()}"


@pytest.mark.parametrize(
    "draw",
    [
        "{{ range(1000) | list | random }}",
        "{{ lipsum(n=1) }}",
        "{{ [range(1000) | list] | map('random') | first }}",
    ],
)
def test_draws_are_seeded_and_reported(draw: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not draws_at_random(with_template("a random text" + TEXT))
    target = with_template(draw + TEXT)
    state = random.getstate()
    assert target.chat_tokens("Hi") == target.chat_tokens("Hi")
    assert random.getstate() == state
    assert capsys.readouterr().err.count("uses randomness") == 1


def test_the_template_for_tools_is_read_too() -> None:
    target = with_template(None)
    target.tokenizer.chat_template = {"default": TEXT, "tool_use": TEXT + "{{ lipsum() }}"}
    assert draws_at_random(target)
