"""`python -m decode.parity`: options, what it prints, exit codes."""

import re
from pathlib import Path

import pytest

from decode import parity
from specalign.lm.model import Target
from tests.builders import saved_taps_drafter


@pytest.fixture
def drafter(tmp_path: Path, target: Target) -> str:
    return saved_taps_drafter(tmp_path / "drafter", target, "fill_in")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--engine", "transformers"], "is not the URL of a server .*; decode.export checks"),
        (["--engine", "http://127.0.0.1:1"], r"models: no answer .* is the server up.*vllm serve"),
        (["--engine", "http://127.0.0.1:1", "--export", "x"], "x: not an export"),
    ],
)
def test_engines_that_there_are_not(
    drafter: str, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parity.main(["--drafter", drafter, *more])
    assert ended.value.code == 2 and re.search(says, capsys.readouterr().err)
