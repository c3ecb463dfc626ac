"""A drafter's files are as they were saved, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from specalign.common.checksums import check_checksums, unchanged, write_checksums
from specalign.common.errors import UserError


def test_what_has_changed_is_refused_and_folders_of_old_pass(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("a card")
    check_checksums(tmp_path)
    check_checksums(tmp_path / "nowhere")
    write_checksums(tmp_path)
    (tmp_path / "README.md").write_text("another card")
    check_checksums(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weighed")
    with pytest.raises(UserError, match="model.safetensors: has changed since it was saved"):
        check_checksums(tmp_path)
    for text, says in (
        ("[]", "must be"),
        ('{"a": 1}', "a=1 must be text"),
        ("{", "not readable JSON"),
    ):
        (tmp_path / "checksums.json").write_text(text)
        with pytest.raises(UserError, match=says):
            check_checksums(tmp_path)


def test_a_folder_of_our_own_is_unchanged_or_not(tmp_path: Path) -> None:
    assert not unchanged(tmp_path) and not unchanged(tmp_path / "nowhere")
    for name in ("a.json", "b.txt"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path, "*")
    (tmp_path / "c.txt").write_text("of somebody else")
    assert unchanged(tmp_path)
    (tmp_path / "b.txt").write_text("c")
    assert not unchanged(tmp_path)
    (tmp_path / "b.txt").unlink()
    assert not unchanged(tmp_path)
    (tmp_path / "checksums.json").write_text("{}")
    assert not unchanged(tmp_path)
