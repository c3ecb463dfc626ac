"""The target's outputs, kept in memory or on disk: the same bits, within their limits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from align.config.drafter import DrafterConfig
from align.config.trainer import TrainerConfig
from align.data import packing
from align.makers.block import from_target
from align.outputs.cache import (
    Row,
    TargetOutputCache,
    TargetOutputs,
    compute_row,
    compute_target_outputs,
    count_bytes,
)
from align.training.datamodule import make_batch
from specalign.common.batch import Batch, Step
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.models.block_config import BlockConfig
from specalign.rows import shards as data

TARGET = load_target("debug")


def config_of(context: str) -> BlockConfig:
    options = DrafterConfig(context=context, block_size=3, taps=2, markov_rank=0)
    return from_target(TARGET, options, None).config


def rows(count: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, TARGET.vocab_size, (30,), generator=generator) for _ in range(count)]
    packed = packing.pack(data.from_lists(texts, [4] * count, [1.0] * count), 32, 0)
    return [packing.collate([row]) for row in packed]


def cache_of(
    folder: Path | None, dtype: str = "fp16", context: str = "shared_kv", disk: float = 1.0
) -> TargetOutputCache:
    options = TrainerConfig(features_gb=disk, features_dtype=dtype)
    return TargetOutputCache(TARGET, config_of(context), options, folder)


def equal(one: Row, two: Row) -> bool:
    same = [torch.equal(one[n], two[n]) and one[n].dtype == two[n].dtype for n in one]
    return one.keys() == two.keys() and all(same)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> Row:
        raise AssertionError("the target is asked again")

    monkeypatch.setattr("align.outputs.cache.compute_row", never)


@pytest.mark.parametrize("context", ["shared_kv", "taps"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_read_back_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: str, dtype: str
) -> None:
    texts, writing = rows(), cache_of(tmp_path, dtype, context)
    fresh = [cache_of(None, dtype, context).row(text, 1.0) for text in texts]
    assert all(equal(writing.row(text, 1.0), row) for text, row in zip(texts, fresh, strict=True))
    forbid(monkeypatch)
    reading = cache_of(tmp_path, dtype, context)
    assert all(equal(reading.row(text, 1.0), row) for text, row in zip(texts, fresh, strict=True))
    with pytest.raises(AssertionError):
        reading.row(texts[0], 0.5)  # another p


def test_a_damaged_row_is_refused(tmp_path: Path) -> None:
    texts = rows()
    for text in texts:
        cache_of(tmp_path).row(text, 1.0)
    torn = min(tmp_path.glob("row-*"))
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{torn.name}: not readable"):
        for text in texts:
            cache_of(tmp_path).row(text, 1.0)


def test_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = rows(8)
    size = count_bytes(cache_of(None).row(texts[0], 1.0))
    cache = cache_of(tmp_path, disk=5.5 * size / 1e9)
    fresh = [cache.row(text, 1.0) for text in texts]
    assert cache.store is not None and cache.store.full and 3 <= cache.store.count <= 5
    assert sum(p.stat().st_size for p in tmp_path.glob("row-*")) <= 5.5 * size
    other = cache_of(tmp_path)
    assert all(equal(other.row(text, 1.0), row) for text, row in zip(texts, fresh, strict=True))
    forbid(monkeypatch)
    both = cache_of(tmp_path)
    assert all(equal(both.row(text, 1.0), row) for text, row in zip(texts, fresh, strict=True))


def test_outputs_of_something_else_are_refused(tmp_path: Path) -> None:
    cache_of(tmp_path).row(rows(1)[0], 1.0)
    with pytest.raises(UserError, match="dtype is 'fp16', this run needs 'bf16'; give another"):
        cache_of(tmp_path, "bf16")
    with pytest.raises(UserError, match="context is 'shared_kv', this run needs 'taps'"):
        cache_of(tmp_path, context="taps")
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError, match="manifest.json: not readable"):
        cache_of(tmp_path)


def one_step() -> Step:
    torch.manual_seed(0)
    texts = [torch.randint(3, TARGET.vocab_size, (n,)) for n in (20, 31, 9, 14)]
    packed = packing.pack(data.from_lists(texts, [4] * 4, [1.0] * 4), 32, 0)[:2]
    return Step(*make_batch(packed, [0, 1], 12, 3, 0), keys=(5, 7))


def kept_in(config: BlockConfig, memory: float) -> TargetOutputCache:
    return TargetOutputCache(TARGET, config, TrainerConfig(keep_features_gb=memory))


@pytest.mark.parametrize("context", ["shared_kv", "taps"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_same_numbers(context: str, temperature: float) -> None:
    config, step = config_of(context), one_step()
    store = kept_in(config, 1.0)
    first, again = (vars_of(store.outputs(step, temperature)) for _ in range(2))
    none = vars_of(kept_in(config, 1e-9).outputs(step, temperature))
    assert all(map(torch.equal, first, again)) and all(map(torch.equal, first, none))
    computed = vars_of(compute_target_outputs(TARGET, step, config, temperature))
    torch.testing.assert_close(first, computed, rtol=2e-3, atol=2e-3)


def test_a_row_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config, step = config_of("shared_kv"), one_step()
    calls: list[int] = []
    store, small = kept_in(config, 1.0), kept_in(config, 1e-9)

    def compute(*given: Any) -> Row:
        calls.append(1)
        return compute_row(*given)

    monkeypatch.setattr("align.outputs.cache.compute_row", compute)
    for cache, count in ((store, 2), (small, 2 + 6)):
        for _ in range(3):
            cache.outputs(step, 1.0)
        assert len(calls) == count


def vars_of(view: TargetOutputs) -> list[torch.Tensor]:
    p = view.places
    places = [p.hidden_PD, p.log_z_P, p.best_P, p.log_p_next_P, p.next_P]
    return [*view.features.tensors, *places]
