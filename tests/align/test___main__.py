"""`python -m align` lists its commands, one line each."""

from __future__ import annotations

import pytest

from align.__main__ import main


def test_every_command_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == [
        "align.features",
        "align.plan",
        "align.sweep",
        "align.synthesize",
        "align.train",
    ]
    assert all(len(line.split()) > 5 and len(line) < 120 for line in lines[3:])
