"""A drafter's files are as they were saved, or refused."""

from pathlib import Path

import pytest

from specalign.common.checksums import check_checksums, write_checksums
from specalign.common.errors import UserError


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("a card")
    check_checksums(tmp_path)  # folders without checksums pass
    write_checksums(tmp_path)
    (tmp_path / "README.md").write_text("another card")
    check_checksums(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weighed")
    with pytest.raises(UserError, match="model.safetensors: has changed since it was saved"):
        check_checksums(tmp_path)
    (tmp_path / "checksums.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="a=1 must be text"):
        check_checksums(tmp_path)
