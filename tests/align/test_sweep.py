"""The command: a sweep of real, tiny trials; wrong words in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.sweep import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["block_objectiv"], "did you mean 'block_objective'"),
        (["block_objective", "--count", "0"], "0 trials (--count, run_cap): must be 1"),
        (["block_objective", "trainer.max_step=3"], "did you mean 'trainer.max_steps'"),
        ([], "required: FILE"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words, "--out", str(tmp_path / "out")])
    error = [
        line for line in capsys.readouterr().err.strip().splitlines() if "trials of" not in line
    ]
    assert stop.value.code == 2 and len(error) == 1 and says in error[0], error
