"""Commands as they are printed, and their options."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specalign.common import commands
from specalign.common.errors import UserError


@pytest.mark.parametrize(
    ("executable", "shown"),
    [
        ("{here}/.venv/bin/python", ".venv/bin/python"),
        ("/opt/my python/bin/python", "'/opt/my python/bin/python'"),
    ],
)
def test_the_interpreter_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", executable.format(here=Path.cwd()))
    assert commands.command("align.train", "output=a b") == f"{shown} -m align.train 'output=a b'"


def test_a_package_lists_its_commands() -> None:
    words = shlex.split(commands.command("align"))
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "train " in run.stdout


def test_a_wrong_option_is_one_line() -> None:
    options = commands.OptionParser(prog="x")
    options.add_argument("--limit", type=int)
    assert options.parse_args(["--limit", "3"]).limit == 3
    for words, says in [(["--limit"], "expected one argument"), (["--lim", "3"], "unrecognized")]:
        with pytest.raises(UserError, match=f"{says}.*--help lists the options"):
            options.parse_args(words)
