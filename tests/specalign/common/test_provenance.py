"""The commit is this checkout's, or null."""

from __future__ import annotations

import subprocess
from pathlib import Path

from specalign.common.provenance import git_state


def test_the_commit_is_this_checkout_s_or_null(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"git_commit": None, "git_dirty": None}

    def git(*words: str) -> str:
        name = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", *name, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        git(*words)
    assert git_state(tmp_path) == {"git_commit": git("rev-parse", "HEAD"), "git_dirty": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["git_dirty"] is True
    (tmp_path / "installed").mkdir()  # a package inside somebody else's checkout
    assert git_state(tmp_path / "installed")["git_commit"] is None
