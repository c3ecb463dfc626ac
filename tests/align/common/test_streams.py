"""Whatever the encoding of the standard streams is, and whoever has closed them: no traceback, and no word is lost that could be shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from align.common.streams import encodable

WORDS = "τ 1.62 × “…” — é ┏━┳│ 語"
TABLE = f"""
from rich.table import Table
from align.common.errors import UserError, cli
from align.common.terminal import PlainConsole
from align.common.text import say
@cli
def main():
    table = Table("τ", "identical", title={WORDS!r})
    table.add_row("1.72 × [1, 2] · 語", "80/80")
    PlainConsole(width=90).print(table)
    say({WORDS!r})
    raise UserError({WORDS!r})
main()
"""


def test_what_an_encoding_lacks_is_written_in_plain_letters() -> None:
    assert encodable(WORDS, "ascii") == r"""tau 1.62 x "..." -- \xe9 +-+| \u8a9e"""
    assert encodable(WORDS, "latin-1") == r"""tau 1.62 × "..." -- é +-+| \u8a9e"""
    assert encodable(WORDS, None) == encodable(WORDS, "utf-8") == WORDS


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r", "utf-16"])
def test_tables_lines_and_errors_in_any_encoding(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", TABLE], capture_output=True, env=environment)
    out, err = done.stdout.decode(encoding), done.stderr.decode(encoding)
    assert done.returncode == 2 and "Traceback" not in err
    assert err == f"error: {encodable(WORDS, encoding)}\n"
    assert out.endswith(encodable(WORDS, encoding) + "\n") and "80/80" in out


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize(
    ("code", "closed", "status"),
    [
        (TABLE, ">&-", 2),
        (TABLE, "2>&-", 2),
        (TABLE, "<&- >&- 2>&-", 2),
        ("import sys; from align.common.errors import cli; cli(lambda: sys.exit(1))()", ">&-", 1),
    ],
)
def test_closed_streams_change_no_exit_code(code: str, closed: str, status: int, buffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered, "CODE": code}
    command = ["bash", "-c", f'"$0" -c "$CODE" {closed}', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == status and "Traceback" not in done.stderr


def test_a_file_opened_later_is_not_written_to_as_the_closed_output(tmp_path: Path) -> None:
    code = f"""
import os
from align.common.errors import cli
from align.common.text import say
@cli
def main():
    file = open({str(tmp_path / "file")!r}, "w")
    say("x")
    os.write(1, b"y")
main()
"""
    command = ["bash", "-c", '"$0" -c "$CODE" >&-', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CODE": code})
    assert (done.returncode, done.stderr, (tmp_path / "file").read_text(encoding="utf-8")) == (0, "", "")


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "codes", "says"),
    [
        ("-m decode", (141,), ""),
        ("-m decode.eval --help", (0, 141), ""),
        ("-m align.train --help-all", (0, 141), ""),
        ("-c", (141,), ""),
        ("-m decode.verify --limit 0", (2,), "error: "),
    ],
)
def test_a_reader_that_goes_away_ends_it_without_a_word(
    words: str, codes: tuple[int, ...], says: str, buffered: str
) -> None:
    """Standard output is a pipe that is closed before a word is written to it."""
    arguments = [*words.split(), *([TABLE] if words == "-c" else [])]
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    done = subprocess.run(
        [sys.executable, *arguments], stdout=writing, stderr=subprocess.PIPE, env=environment
    )
    os.close(writing)
    assert done.returncode in codes and done.stderr.decode().startswith(says)
    assert bool(says) == bool(done.stderr)


def test_a_broken_connection_is_not_taken_for_a_reader_that_went_away() -> None:
    code = "from align.common.errors import cli\ndef main(): raise BrokenPipeError(32, 'Broken pipe')\ncli(main)()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: Broken pipe\n")
