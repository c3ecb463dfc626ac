"""Commands as they are printed, and their options."""

import pytest

from specalign.common import commands
from specalign.common.errors import UserError


def test_a_wrong_option_is_one_line() -> None:
    options = commands.OptionParser(prog="x")
    options.add_argument("--limit", type=int)
    assert options.parse_args(["--limit", "3"]).limit == 3
    for words, says in [(["--limit"], "expected one argument"), (["--lim", "3"], "unrecognized")]:
        with pytest.raises(UserError, match=f"{says}.*--help lists the options"):
            options.parse_args(words)
