"""What a template reads beside the conversation is named once."""

from __future__ import annotations

from typing import Any

import pytest

from align.common.text import say_once
from align.folder.chat import Chat
from align.folder.readings import Readings, readings
from align.target.model import Target
from tests.builders import switching_target

TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"
DATED = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"


def with_template(template: str, **kwargs: Any) -> Target:
    say_once.cache_clear()
    target = switching_target()
    target.tokenizer.chat_template = template
    target.chat = Chat(kwargs)
    return target


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (TEXT, Readings()),
        (DATED + TEXT, Readings(True, False, "date_string")),
        (TEXT + "{{ strftime_now('%H') }}", Readings(True)),
        (TEXT + "{% if tools %}{{ strftime_now('%H') }}{% endif %}", Readings(True)),
        (
            TEXT + "{% if messages[0].role == 'system' %}{{ [1, 2, 3] | random }}{% endif %}",
            Readings(False, True),
        ),
        ("{% if tools %}{{ raise_exception('no') }}{% endif %}" + TEXT, Readings()),
    ],
)
def test_they_are_found_by_rendering(template: str, found: Readings) -> None:
    assert readings(with_template(template)) == found


def test_a_switch_that_is_given_stops_the_clock() -> None:
    target = with_template(DATED + TEXT, date_string="26 Jul 2024")
    assert readings(target) == Readings()
    assert target.tokenizer.decode(target.chat_tokens("Hi")) == "26 Jul 2024Hi"


def test_notes_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    target = with_template(DATED + "{{ ['a', 'b', 'c'] | random }}" + TEXT)
    assert target.chat_tokens("Hi") == target.chat_tokens("Hi")
    said = capsys.readouterr().err
    assert said.count("reads the clock; prompts say today's date (template_kwargs.date_string sets it)") == 1
    assert said.count("draws at random; here always the same draw") == 1


def test_a_base_model_has_no_template_that_reads_anything() -> None:
    base = switching_target()
    base.tokenizer.chat_template = None
    assert readings(base) == Readings()
