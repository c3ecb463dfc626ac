"""An index saves reading the shards, and says nothing else than they do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from align.common.errors import UserError
from align.data import index as indexes
from align.data import shards as data
from align.data.index import ShardFolder, read_samples
from align.data.shards import Index
from tests.builders import manifest

FIRST = data.from_lists([[1, 2, 3], [4, 5]], [1, 0], [0.0, 1.0])
SECOND = data.from_lists([[70000]], [1], [0.5])


def written(folder: Path, *shards: data.Samples) -> None:
    sums = [data.write_shard(folder, i, s) for i, s in enumerate(shards)]
    data.write_manifest(folder, manifest(shards=len(shards), sha256=sums))


def told(folder: Path) -> list[tuple[list[int], int, float]]:
    found = read_samples(folder)
    return [
        (found[i].tolist(), int(found.answer_start[i]), float(found.temperature[i]))
        for i in range(len(found))
    ]


ONE = [([1, 2, 3], 1, 0.0), ([4, 5], 0, 1.0)]


def test_a_second_opening_reads_no_shard_and_a_grown_folder_its_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, FIRST)
    assert told(tmp_path) == ONE
    read: list[int] = []
    real = data.read_shard

    def counted(path: Path, *args: object, **more: object) -> data.Samples:
        read.append(int(path.stem.split("-")[1]))
        return real(path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(indexes, "read_shard", counted)
    assert len(read_samples(tmp_path)) == 2 and read == []
    written(
        tmp_path, FIRST, SECOND
    )  # written anew: another time of change, so the first is looked at once more
    os.utime(data.shard_path(tmp_path, 0), ns=(1, 1))
    assert len(read_samples(tmp_path)) == 3 and sorted(read) == [0, 1]
    read.clear()
    assert told(tmp_path) == [*ONE, ([70000], 1, 0.5)] and read == [0, 1]


@pytest.mark.parametrize("damage", ["torn", "other", "flipped", "read-only", "a pipe"])
def test_an_index_that_is_damaged_or_anothers_is_built_again(tmp_path: Path, damage: str) -> None:
    written(tmp_path, FIRST)
    told(tmp_path)
    path = tmp_path / "index.safetensors"
    raw = path.read_bytes()
    if damage == "torn":
        path.write_bytes(raw[:-3])
    elif damage == "flipped":
        path.write_bytes(raw[:-20] + bytes([raw[-20] ^ 1]) + raw[-19:])
    elif damage == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "read-only":
        path.unlink()
        path.mkdir()  # nothing can be written in its place
    else:
        written(tmp_path, SECOND)
        assert told(tmp_path) == [([70000], 1, 0.5)]
        return
    assert told(tmp_path) == ONE


def test_a_shard_that_is_gone_or_damaged_is_refused_whatever_the_index_says(tmp_path: Path) -> None:
    written(tmp_path, FIRST, SECOND)
    told(tmp_path)
    path = data.shard_path(tmp_path, 0)
    raw, state = path.read_bytes(), path.stat()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(UserError, match="has changed since it was written"):
        read_samples(tmp_path)
    os.utime(
        path, ns=(state.st_atime_ns, state.st_mtime_ns)
    )  # a disk that forgets: nothing but the bytes tells
    found = read_samples(tmp_path)
    assert found[2].tolist() == [70000]
    with pytest.raises(UserError, match="has changed since it was written"):
        found[0]
    path.unlink()
    with pytest.raises(UserError, match="not a readable data shard"):
        read_samples(tmp_path)


def test_shards_are_closed_again_and_slices_are_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "OPEN", 1)
    written(tmp_path, FIRST, SECOND)
    shards = ShardFolder(tmp_path, data.read_manifest(tmp_path), 70001)
    assert [len(s) for s in shards] == [len(s) for s in shards[:2]] == [2, 1] and len(shards._open) == 1
    with pytest.raises(UserError, match="token 70000 is none of the target's 70000"):
        ShardFolder(tmp_path, data.read_manifest(tmp_path), 70000)[1]


def test_token_ids_take_the_narrowest_type(tmp_path: Path) -> None:
    written(tmp_path, FIRST, SECOND)
    kinds = [data.read_shard(data.shard_path(tmp_path, i)).tokens.dtype for i in (0, 1)]
    assert kinds == [torch.uint16, torch.int32]
    assert Index.of([]).first_S.tolist() == [0] and len(Index.of([])) == 0
