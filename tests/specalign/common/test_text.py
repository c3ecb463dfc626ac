"""Values and times as text."""

import pytest

from specalign.common.text import html_text, markdown_text, printable, say


def test_control_characters_become_escapes() -> None:
    assert printable("a\tb\nc\r\nd é 語 👩\u200d🔬") == "a\tb\nc\r\nd é 語 👩\u200d🔬"
    assert printable("\x1b[2J\x00\x7f\x9b\rx\u202e\u2066\udc80") == (
        "\\x1b[2J\\x00\\x7f\\x9b\\rx\\u202e\\u2066\\udc80"
    )


def test_markdown_holds_no_html_and_ends_no_cell() -> None:
    assert markdown_text("<b>|`a`\n[x](y)&") == "&lt;b&gt;\\|\\`a\\` [x]\\(y)&amp;"


def test_html_holds_no_element_and_no_control_character() -> None:
    assert html_text("<b>\x1b[31m\u202e") == r"&lt;b&gt;\x1b[31m\u202e"


def test_what_the_terminal_lacks_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    say("\x1b[31m\ud800", error=True)
    assert capsys.readouterr().err == "\\x1b[31m\\ud800\n"
