"""The command on a tiny target."""

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
