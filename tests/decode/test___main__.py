"""`python -m decode` lists its commands, one line each."""

from __future__ import annotations

import pytest

from decode.__main__ import main


def test_every_command_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == [
        "decode.advise",
        "decode.compare",
        "decode.eval",
        "decode.export",
        "decode.generate",
        "decode.parity",
        "decode.report",
        "decode.verify",
    ]
    assert all(len(line.split()) > 5 and len(line) < 120 for line in lines[3:])


def test_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "--limit", "2"])
    assert "lists the commands)" in capsys.readouterr().err
