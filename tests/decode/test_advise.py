"""The command on a tiny target; wrong words in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.advise import main

WORDS = ["--target", "debug", "--drafter", "lookup"]


def test_a_page_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--limit 2 --max-new-tokens 6 --temperatures 0,1 --batches 1,2"
    short = sizes.split()
    main([*WORDS, *short, "--draft-tokens", "2", "--out", str(tmp_path)])
    page = capsys.readouterr().out
    assert "| drafts | temperature | τ | batch 1, tokens/s |" in page
    assert (tmp_path / "advice.md").read_text() in page.replace(
        f"\n\n{tmp_path / 'advice.md'}\n", "\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--temperatures", "warm"], "'warm' is not a number"),
        (["--target", "debug", "--drafter", "no/such/folder/at/all"], "no/such/folder"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words, "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and says in error and len(error.splitlines()) == 1, error
