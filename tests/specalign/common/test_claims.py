"""One process at a time writes into a folder; what the dead left is cleared away."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specalign.common import claims
from specalign.common.claims import LOCK, Claim, FolderInUse, claim_when_free, scratch, tidy
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


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_a_dead_one_forgotten(tmp_path: Path) -> None:
    first = holder(tmp_path / "run")
    with pytest.raises(UserError, match=f"output={tmp_path}/run: another process writes there"):
        Claim(tmp_path / "run", "output")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert (tmp_path / "run" / LOCK).exists()
    Claim(tmp_path / "run", "output").release()
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_a_folder_in_use_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trials of a sweep begin at once: one writes their text, the other one waits."""
    first = holder(tmp_path / "data")
    with pytest.raises(FolderInUse):
        Claim(tmp_path / "data", "data.path")
    attempts = []

    def end_first(seconds: float) -> None:
        attempts.append(seconds)
        if len(attempts) == 2:
            first.kill()
            first.wait()

    monkeypatch.setattr(claims.time, "sleep", end_first)
    lines: list[str] = []
    with claim_when_free(tmp_path / "data", "data.path", lines.append):
        assert len(attempts) == 2
    assert lines == [
        f"note: data.path={tmp_path}/data: another process writes there; this one waits for it"
    ]


def test_a_process_may_claim_twice_and_leaves_no_empty_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    with Claim(folder, "--out"), Claim(folder, "--out"):
        pass
    assert not (tmp_path / "a").exists()
    with Claim(folder, "--out"):
        (folder / "kept").touch()
    assert [p.name for p in folder.iterdir()] == ["kept"]


def test_temporary_folders_of_the_dead_are_removed(tmp_path: Path) -> None:
    """Those of a living process, of another kind and behind a link stay."""
    for name in ("kind-a/b", "other-a", "far/kind-c"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "kind-link").symlink_to(tmp_path / "far")
    alive = holder(tmp_path / "kind-alive")
    try:
        with scratch("kind-", tmp_path) as folder:
            (folder / "x").touch()
            names = {"other-a", "far", "kind-link", "kind-alive", folder.name}
            assert {p.name for p in tmp_path.iterdir()} == names
    finally:
        alive.kill()
        alive.wait()
    assert not folder.exists() and (tmp_path / "far/kind-c").is_dir()


def test_a_finished_folder_is_tidied(tmp_path: Path) -> None:
    """Its writer was killed after its last file, and nobody writes there again."""
    for name in (LOCK, "manifest.json"):
        (tmp_path / name).write_text("1\n")
    (tmp_path / f".x{UNFINISHED}").mkdir()
    tidy(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    left = [tmp_path / f".a.json.x1{UNFINISHED}", tmp_path / "drafter" / f".b.x2{UNFINISHED}"]
    others = [tmp_path / ".hidden", tmp_path / "drafter/b"]
    (tmp_path / "drafter").mkdir()
    for path in (*left, *others):
        path.touch()
    left.append(tmp_path / f".c.x3{UNFINISHED}")
    left[-1].mkdir()
    (left[-1] / ".tmp1a2b3c").touch()
    with Claim(tmp_path, "output"):
        assert not any(p.exists() for p in left) and all(p.exists() for p in others)


@pytest.mark.parametrize("name", ["file", "file/inside", "/proc/nowhere", "x" * 300, "nul\0"])
def test_what_cannot_be_written_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out=.*(is a file|can't be written)"):
        Claim(tmp_path / name, "--out")


def test_a_link_in_a_locks_place_leads_nowhere(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    folder.mkdir()
    (folder / LOCK).symlink_to(precious)
    with pytest.raises(UserError, match="--out="):
        Claim(folder, "--out")
    assert precious.read_text() == "mine"


def test_a_folder_in_a_locks_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(UserError, match="--out="):
        Claim(tmp_path, "--out")
