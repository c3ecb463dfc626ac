"""One process at a time writes into a folder; what killed processes left is removed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specalign.common import claims
from specalign.common.claims import LOCK, Claim, FolderInUse, claim_when_free
from specalign.common.errors import UserError
from specalign.common.files import UNFINISHED

HOLD = """
import sys, time
from pathlib import Path
from specalign.common.claims import Claim
with Claim(Path(sys.argv[1]), "output"):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed the folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_second_processes_wait_or_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with holder(tmp_path / "data") as first:
        with pytest.raises(FolderInUse, match=f"output={tmp_path}/data: another process"):
            Claim(tmp_path / "data", "output")

        def end_first(seconds: float) -> None:
            first.kill()
            first.wait()

        monkeypatch.setattr(claims.time, "sleep", end_first)
        with claim_when_free(tmp_path / "data", "data.path", lines.append):
            pass
    note = f"note: data.path={tmp_path}/data: another process is writing there; waiting for it"
    assert lines == [note]
    assert not (tmp_path / "data" / LOCK).exists()


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    left = [tmp_path / f".a.json.x1{UNFINISHED}", tmp_path / "drafter" / f".b.x2{UNFINISHED}"]
    for path in left:
        path.mkdir(parents=True)
        (path / "part").touch()
    (tmp_path / ".hidden").touch()
    with Claim(tmp_path, "output"):
        assert not any(p.exists() for p in left) and (tmp_path / ".hidden").exists()


@pytest.mark.parametrize("name", ["file", "file/inside", "/proc/nowhere", "x" * 300])
def test_what_cannot_be_written_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out=.*(can't be written|is a file)"):
        Claim(tmp_path / name, "--out")
