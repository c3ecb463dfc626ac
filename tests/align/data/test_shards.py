"""Torn and missing shards are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.data import shards as data


def test_torn_and_missing_data_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json"):
        data.read_samples(tmp_path)
    data.write_manifest(tmp_path, {"shards": 1})
    with pytest.raises(UserError, match="not a readable data shard"):
        data.read_samples(tmp_path)
    data.shard_path(tmp_path, 0).write_bytes(b"torn")
    with pytest.raises(UserError, match="not a readable data shard"):
        data.read_samples(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="not readable JSON"):
        data.read_manifest(tmp_path)
