"""What a terminal shows of hostile text."""

import io

from rich.table import Table

from specalign.common.terminal import PlainConsole

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
