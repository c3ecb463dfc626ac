"""Samples packed into rows give their texts back."""

from __future__ import annotations

from pathlib import Path

from align.data import packing
from align.data import shards as data
from align.data.index import read_samples
from tests.builders import manifest


def test_shards_round_trip_and_pack(tmp_path: Path) -> None:
    samples = data.from_lists([[1, 2, 3, 4], [5, 6], list(range(10, 22))], [2, 1, 4], [0.0, 1.0, 0.5])
    data.write_shard(tmp_path, 0, samples)
    data.write_manifest(tmp_path, manifest())
    again = read_samples(tmp_path)
    assert again.tokens.tolist() == samples.tokens.tolist() and len(again) == 3
    rows = packing.pack(again, 8, seed=0)
    seen = sorted(t for r in rows for t in r.tokens_L[r.document_L >= 0].tolist())
    assert seen == sorted([1, 2, 3, 4, 5, 6, *range(10, 18)])  # the long one is cut at the row's length
    batch = packing.collate(rows)
    mask = batch.attention_mask()[:, 0]
    for b in range(len(rows)):
        for i in range(8):
            for j in range(8):
                same = batch.document_BL[b, i] == batch.document_BL[b, j] >= 0
                assert bool(mask[b, i, j]) == bool((j <= i and same) or i == j)
