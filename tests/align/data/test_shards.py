"""Torn and missing shards are one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from align.common.errors import UserError
from align.data import shards as data
from align.data.index import read_samples
from tests.builders import manifest


def test_torn_and_missing_data_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json"):
        read_samples(tmp_path)
    data.write_manifest(tmp_path, manifest())
    with pytest.raises(UserError, match="not a readable data shard"):
        read_samples(tmp_path)
    data.shard_path(tmp_path, 0).write_bytes(b"torn")
    with pytest.raises(UserError, match="not a readable data shard"):
        read_samples(tmp_path)
    data.write_manifest(tmp_path, manifest(shards="1"))
    with pytest.raises(UserError, match="shards='1' must be an integer"):
        read_samples(tmp_path)
    for shards in (-1, 2**31, 10**30):
        data.write_manifest(tmp_path, manifest(shards=shards))
        with pytest.raises(UserError, match="must be a whole number from 0, below 2"):
            read_samples(tmp_path)
    data.write_manifest(tmp_path, manifest(shards=2**31 - 1))
    with pytest.raises(UserError, match="shard-2147483646.safetensors: not a readable data shard"):
        read_samples(tmp_path)
    for key in ("shards", "samples", "tokens", "seed", "prompt_temperature", "answer_temperatures"):
        data.write_manifest(tmp_path, {k: v for k, v in manifest().items() if k != key})
        with pytest.raises(UserError, match=f"{key} is missing"):
            data.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="not readable JSON"):
        data.read_manifest(tmp_path)


def test_a_changed_byte_and_tensors_that_are_no_samples_are_refused(tmp_path: Path) -> None:
    samples = data.from_lists([[1, 2, 3], [4, 5]], [1, 0], [0.0, 1.0])
    sha256 = data.write_shard(tmp_path, 0, samples)
    data.write_manifest(tmp_path, manifest(sha256=[sha256]))
    assert read_samples(tmp_path, 6).tokens.tolist() == [1, 2, 3, 4, 5]
    path = data.shard_path(tmp_path, 0)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(UserError, match="has changed since it was written"):
        read_samples(tmp_path, 6)
    for change, why in (
        ({"tokens": torch.tensor([1, 2, 3, 4, 6])}, "token 6 is none of the target's 6"),
        ({"offsets": torch.tensor([0, 6, 5])}, "offsets do not rise"),
        ({"offsets": torch.tensor([0, 3])}, "offsets do not rise"),
        ({"answer_start": torch.tensor([1])}, "disagree"),
        ({"answer_start": torch.tensor([4, 0])}, "outside its sample"),
        ({"temperature": torch.zeros(2, 1)}, "wrong shape"),
    ):
        data.write_shard(tmp_path, 0, replace(samples, **change))
        with pytest.raises(UserError, match=why):
            data.read_shard(path, None, 6)
