"""The command `align.synthesize` with what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from align import synthesize


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing written that would keep the settings of a first try."""
    words = ["recipe=debug_block", f"output={tmp_path}/out"]
    with pytest.raises(SystemExit) as stop:
        synthesize.main([*words, "data.writer=openai:http://127.0.0.1:9"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert "http://127.0.0.1:9/v1/models: no usable answer" in error
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
