"""Shards and packed rows return the samples; damaged shards are refused when a folder is opened."""

from pathlib import Path

import pytest
import torch

from align.data import packing
from align.data.draft_vocab import coverage, frequent_tokens
from align.data.packing import TEXT, RowStream
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.rows import shards as data
from specalign.rows.shards import read_samples
from tests.builders import manifest

FIRST = data.from_lists([[1, 2, 3, 4], [5, 6], list(range(10, 22))], [2, 1, 4], [0.0, 1.0, 0.5])
SECOND = data.from_lists([[70000]], [1], [0.5])


def write(folder: Path, *shards: data.Samples) -> None:
    hashes = [data.write_shard(folder, i, samples) for i, samples in enumerate(shards)]
    data.write_manifest(folder, manifest(shards=len(shards), sha256=hashes))


def test_samples_of_several_shards(tmp_path: Path) -> None:
    write(tmp_path, FIRST, SECOND)
    samples = read_samples(tmp_path)
    assert torch.cat([samples[i] for i in range(4)]).tolist() == [*FIRST.tokens.tolist(), 70000]
    assert samples.answer_start.tolist() == [2, 1, 4, 1] and samples.first_S.tolist() == [0, 3, 4]
    chosen = samples.select([3, 1]).select(torch.tensor([1, 0]))
    assert [chosen[i].tolist() for i in range(2)] == [[5, 6], [70000]]
    assert chosen.temperature.tolist() == [1.0, 0.5] and chosen.token_count == 3
    assert [shard.tokens.dtype for shard in samples.shards] == [torch.uint16, torch.int32]
    with pytest.raises(UserError, match="token 70000 is not in the target's vocabulary of 70000"):
        read_samples(tmp_path, 70000)


def test_samples_are_packed_whole(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    rows = packing.pack(read_samples(tmp_path), 8, seed=0)
    seen = sorted(t for r in rows for t in r.tokens_L[r.document_L >= 0].tolist())
    assert seen == sorted([1, 2, 3, 4, 5, 6, *range(10, 18)])  # the long one is cut to the row
    batch = packing.collate(rows)
    mask, documents = batch.attention_mask()[:, 0], batch.document_BL
    for b in range(len(rows)):
        for i in range(8):
            for j in range(8):
                same = documents[b, i] == documents[b, j] >= 0
                assert bool(mask[b, i, j]) == bool((j <= i and same) or i == j)


def test_missing_and_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json"):
        read_samples(tmp_path)
    data.write_manifest(tmp_path, manifest())
    for _ in range(2):
        with pytest.raises(UserError, match="not a readable data shard"):
            read_samples(tmp_path)
        data.shard_path(tmp_path, 0).write_bytes(b"torn")
    says_of = {"1": "shards='1' must be an integer", -1: "shards=-1, but sha256 lists 1"}
    for shards, says in says_of.items():
        data.write_manifest(tmp_path, manifest(shards=shards))
        with pytest.raises(UserError, match=says):
            read_samples(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="not readable JSON"):
        data.read_manifest(tmp_path)


def test_a_changed_byte(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    path = data.shard_path(tmp_path, 0)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(UserError, match="has changed since it was written"):
        read_samples(tmp_path)


def rows_of(count: int, first: int = 10) -> packing.PackedRows:
    texts = [[first + i] * 8 for i in range(count)]
    return packing.pack(data.from_lists(texts, [1] * count, [1.0] * count), 8, 0)


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    stream = RowStream(rows_of(7), 3)
    epochs = [[stream.key(7 * e + i) for i in range(7)] for e in (0, 1, 2, 0)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] == epochs[3] and epochs[0] != epochs[1]
    text = RowStream(rows_of(7), 3, rows_of(7), 7)
    assert [text.key(i) - TEXT for i in range(7)] != epochs[0]


def test_text_comes_first_and_does_not_move_the_rest() -> None:
    text, own = rows_of(3, 20), RowStream(rows_of(4), 3)
    both = RowStream(own.own, 3, text, 5)
    keys = [both.key(i) for i in range(9)]
    assert [key >= TEXT for key in keys] == [True] * 5 + [False] * 4
    assert keys[5:] == [own.key(i) for i in range(4)]
    assert both.row(keys[0]).tokens_L.equal(text[keys[0] - TEXT].tokens_L)
    assert both.row(keys[5]).tokens_L.equal(own.row(keys[5]).tokens_L)


def test_the_draft_vocabulary_has_frequent_answer_tokens_and_every_end(target: Target) -> None:
    # answers: 9 9 7 8, 6 9
    written = data.from_lists([[50, 50, 50, 9, 9, 7, 8], [50, 6, 9]], [3, 1], [1.0, 1.0])
    samples = data.ShardSamples.of([written])
    ids = frequent_tokens(samples, target, 3)
    assert ids is not None and ids.tolist() == sorted([6, 9, *target.eos_ids])  # 6 ties with 7, 8
    assert coverage(samples, ids, target) == pytest.approx(4 / 6)
    assert frequent_tokens(samples, target, 0) is None and coverage(samples, None, target) == 1.0
