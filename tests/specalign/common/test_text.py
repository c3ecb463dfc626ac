"""Values and times as text, and what a terminal shows of hostile text."""

import io

import pytest
from rich.table import Table

from specalign.common.terminal import PlainConsole
from specalign.common.text import markdown_text, printable, say


def test_control_characters_become_escapes() -> None:
    assert printable("a\tb\nc\r\nd é 語 👩\u200d🔬") == "a\tb\nc\r\nd é 語 👩\u200d🔬"
    assert printable("\x1b[2J\x00\x7f\x9b\rx\u202e\u2066\udc80") == (
        "\\x1b[2J\\x00\\x7f\\x9b\\rx\\u202e\\u2066\\udc80"
    )


def test_markdown_holds_no_html_and_ends_no_cell() -> None:
    assert markdown_text("<b>|`a`\n[x](y)&") == "&lt;b&gt;\\|\\`a\\` [x]\\(y)&amp;"


def test_what_the_terminal_lacks_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    say("\x1b[31m\ud800", error=True)
    assert capsys.readouterr().err == "\\x1b[31m\\ud800\n"


HOSTILE = "[/b] :smile: \x1b[31mred \x9b2J \u202eesrever"


def test_tables_and_lines_show_hostile_text_as_it_is() -> None:
    out = io.StringIO()
    console = PlainConsole(width=200, file=out, force_terminal=True, color_system=None)
    table = Table("a", title=HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)
    console.say(HOSTILE)
    shown = out.getvalue()
    assert shown.count("[/b] :smile: \\x1b[31mred \\x9b2J \\u202eesrever") == 3
    assert not any(c in shown for c in "\x1b\x07\x9b\u202e")
