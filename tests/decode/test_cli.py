"""Command-line mistakes are one line that names the option and the nearest valid one."""

from pathlib import Path

import pytest

from decode.cli import Parser, number, parse_whole, path
from specalign.common.errors import UserError


@pytest.fixture
def parser() -> Parser:
    made = Parser(prog="x")
    made.add_argument("--limit", type=parse_whole(1))
    made.add_argument("--temperature", type=number)
    made.add_argument("--out", type=path)
    made.add_chat_options()
    return made


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--limt=3"], "'--limt=3' .did you mean '--limit'"),
        (["--lim", "3"], "'--lim'"),  # no abbreviations
        (["--limit"], "expected one argument.*--help lists the options"),
        (["--limit", "0"], "--limit: '0' is not an integer >= 1"),
        (["--temperature", "nan"], "--temperature: 'nan' is not a number"),
        (["--limit", "99999999999"], "'99999999999' is more than 2147483647"),
        (["--out", "~nobody_here/x"], "--out: '~nobody_here/x': no such user"),
        (["--template-kwargs", "thinking"], "--template-kwargs: 'thinking' is not key=value"),
        (["stray"], "unrecognized argument 'stray'"),
    ],
)
def test_mistakes_are_one_line(parser: Parser, words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parser.parse_args(words)


def test_what_is_right_is_read(parser: Parser) -> None:
    options = parser.parse_args(["--limit", "3", "--temperature", "0.5", "--out", "~/a"])
    assert (options.limit, options.temperature, options.out) == (3, 0.5, Path.home() / "a")
    assert (options.template_kwargs, options.system) == ({}, None)
    words = ["--template-kwargs", "enable_thinking=false", "--template-kwargs", '{"effort": "low"}']
    assert parser.parse_args(words).template_kwargs == {"enable_thinking": False, "effort": "low"}
