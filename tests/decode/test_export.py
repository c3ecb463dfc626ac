"""`python -m decode.export`: options, what it prints, exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.models.checkpoints.block import save_drafter
from align.target.model import Target
from decode import export
from decode.exporting.verdict import Verdict
from tests.builders import block_network, saved_taps_drafter


@pytest.mark.parametrize(
    ("text", "says"), [("dflsh", "unknown format 'dflsh'.*dflash"), (",", "name one of dflash")]
)
def test_formats_that_there_are_not(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        export.read_names(text)


def test_a_drafter_is_exported_for_the_target_that_it_names(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = saved_taps_drafter(tmp_path / "drafter", target, "fill_in")
    words = ["--drafter", drafter, "--format", "dflash", "--out", str(tmp_path / "out")]
    export.main([*words, "--limit", "1", "--max-new-tokens", "4", "--device", "cpu"])
    said = capsys.readouterr().out
    assert "draft tokens: the same" in said and "THE SAME DRAFTER" in said and "vllm serve debug" in said
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_difference_ends_with_exit_code_1(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_drafter(block_network(target, "taps", whole=True), tmp_path / "drafter")
    found = Verdict("dflash", tmp_path, same=False, lines=["the files: block: DIFFERENT"])
    monkeypatch.setattr("decode.exporting.parity.exported", lambda *a, **k: [found])
    words = ["--drafter", str(tmp_path / "drafter"), "--format", "dflash", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        export.main([*words, "--push", "me/drafter"])  # nothing is sent either
    assert ended.value.code == 1 and "NOT THE SAME DRAFTER" in capsys.readouterr().out


@pytest.mark.parametrize("repo", ["runs/exported", "./out", "one/two/three", "plain", "me/a b"])
def test_a_place_here_is_no_repository(repo: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        export.main(["--drafter", "nowhere", "--format", "dflash", "--out", "out", "--push", repo])
    assert ended.value.code == 2 and f"--push='{repo}': name one repository" in capsys.readouterr().err
