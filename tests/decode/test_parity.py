"""`python -m decode.parity`: options, what it prints, exit codes."""

import re
from pathlib import Path

import pytest

from decode import parity


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--engine", "transformers"], "is not the URL of a server .*; decode.export checks"),
        (["--engine", "http://127.0.0.1:1"], r"models: no answer .* is the server up.*vllm serve"),
        (["--engine", "http://127.0.0.1:1", "--export", "x"], "x: not an export"),
    ],
)
def test_engines_that_there_are_not(
    drafter: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parity.main(["--drafter", str(drafter), *more])
    assert ended.value.code == 2 and re.search(says, capsys.readouterr().err)
