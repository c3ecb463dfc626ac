"""What a data folder costs by its size: memory and seconds to the first training batch and step, on fabricated token ids.

    python -m tests.data_scale                       # 10,000, 100,000 and 1,000,000 samples
    python -m tests.data_scale 5000 --folder DIR     # another number; the folders are left in DIR

Each size is opened in a process of its own. Seconds and memory
count from the loaded target to the first batch: opening, splitting, the draft vocabulary, packing, held-out rows. Memory is what the process holds of its own
(RssAnon); pages of the mapped shards belong to the system, which drops them where it needs room. The first step is that of a run of
`align.train`: from the loaded target to the step's end, drafter and trainer included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from align.common.errors import cli
from align.common.text import say
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data import shards
from align.data.supply import open_supply
from align.target.loading import load_target
from align.target.model import Target
from align.training import run
from align.training.base_module import DrafterModule
from align.training.build import draft_vocab
from align.training.datamodule import RowsModule

SHARD = 256
MEAN = 120


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("samples", nargs="*", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument(
        "--folder", type=Path, help="where the data are written (default: a temporary folder)"
    )
    parser.add_argument("--open", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        say(json.dumps(opened(recipe_of(options.folder, options.samples[0]))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        say(
            "| samples | tokens | on disk | first batch | memory | to the end of the first step |\n|---|---|---|---|---|---|"
        )
        for samples in options.samples:
            folder = (options.folder or Path(temporary)) / str(samples)
            tokens = fabricate(folder, samples)
            size = sum(path.stat().st_size for path in folder.glob("shard-*"))
            words = [
                sys.executable,
                "-m",
                "tests.data_scale",
                str(samples),
                "--folder",
                str(folder),
                "--open",
            ]
            found = json.loads(subprocess.check_output(words))
            say(
                f"| {samples:,} | {tokens / 1e6:,.1f}M | {size / 1e6:,.0f} MB | {found['seconds']:.1f} s | "
                f"{found['megabytes']:.0f} MB | {found['step']:.1f} s |",
            )


def recipe_of(folder: Path, samples: int) -> Recipe:
    words = [
        f"data.path={folder}",
        f"data.samples={samples}",
        "data.length=1024",
        "data.validation_fraction=0.02",
    ]
    one_step = ["trainer.max_steps=1", "trainer.warmup_steps=1", "trainer.resume=never"]
    return load_recipe(
        ["recipe=debug_block", *words, *one_step, "trainer.batch_size=8", f"output={folder}/run"]
    )


def fabricate(folder: Path, samples: int) -> int:
    """Write samples of random lengths and ids; how many tokens they hold."""
    target, rng = load_target("debug", device="cpu"), np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    hashes, total = list[str](), 0
    for number, first in enumerate(range(0, samples, SHARD)):
        lengths = rng.integers(MEAN // 3, 2 * MEAN - MEAN // 3, min(SHARD, samples - first))
        offsets = np.concatenate(([0], lengths.cumsum()))
        tokens = rng.zipf(1.3, offsets[-1]) % target.vocab_size
        found = shards.Samples(
            torch.from_numpy(tokens.astype(np.int64)),
            torch.from_numpy(offsets),
            torch.from_numpy(lengths // 4),
            torch.from_numpy((np.arange(len(lengths)) % 2).astype(np.float32)),
        )
        hashes.append(shards.write_shard(folder, number, found))
        total += int(offsets[-1])
    manifest = {
        "target": "debug", "target_sha256": target.hash, "shards": len(hashes), "samples": samples, "tokens": total,
        "answer_tokens": total, "sha256": hashes, "seed": 0, "prompt_temperature": 1.0, "answer_temperatures": [0.0, 1.0],
    }  # fmt: skip
    shards.write_manifest(folder, manifest)
    return total


def opened(recipe: Recipe) -> dict[str, float]:
    """Seconds and megabytes from the loaded target to the first batch."""
    target = load_target("debug", device="cpu")
    before, started = _own_megabytes(), time.perf_counter()
    supply = open_supply(recipe, target, quiet=True)
    draft_vocab(recipe, target, supply, None)
    rows = RowsModule(recipe, supply.stream(recipe), supply.validation, block_size=4)
    sampler = rows.sampler(rank=0, world=1)
    rows.step(sampler, next(iter(sampler)))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "megabytes": _own_megabytes() - before, "step": stepped(recipe)}


def stepped(recipe: Recipe) -> float:
    """Seconds from the loaded target to the end of the first step of `align.train`."""
    loaded, ended = list[float](), list[float]()

    def load(*words: Any, **more: Any) -> Target:
        target = load_target(*words, **more)
        loaded.append(time.perf_counter())
        return target

    run.load_target = load
    DrafterModule.on_train_batch_end = lambda *_: ended.append(time.perf_counter())  # type: ignore[method-assign]
    run.train(recipe, quiet=True)
    return ended[0] - loaded[0]


def _own_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


if __name__ == "__main__":
    cli(main)()
