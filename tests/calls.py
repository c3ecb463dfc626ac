"""What one call of a target costs on this machine: rows by context, its layers in one call and through its modules, interleaved,
beside the time that reading its weights takes. All of them take turns.

python -m tests.calls                                     # SmolLM2-135M-Instruct
python -m tests.calls --target debug --contexts 128       # what is not arithmetic
python -m tests.calls --bf16                              # and out of a checkpoint in bf16, and with products in bf16

A speed is worth something on an idle machine alone. No test runs this.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from align.common.errors import cli
from align.common.text import say
from align.kernels.linear import few_rows
from align.target.loading import load_target
from align.target.model import Target
from align.target.names import DEFAULT_TARGET
from decode.cli import Parser


def main() -> None:
    parser = Parser(prog="python -m tests.calls", description="What does one call of a target cost here?")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument(
        "--rows", type=numbers, default="1,2,3,5,9,16", help="new tokens a call, with commas between"
    )
    parser.add_argument("--contexts", type=numbers, default="128,2048,7000", help="tokens before them")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--bf16", action="store_true", help="the same weights in bf16, multiplied in fp32 and in bf16"
    )
    options = parser.parse_args()
    target = load_target(options.target, dtype="float32", device="cpu", decoding=True)
    others = in_bf16(options.target) if options.bf16 else []
    size, reading = weight_bytes(target), Reading()
    say(
        f"{options.target}, fp32, {torch.get_num_threads()} threads; {size / 1e6:.0f} MB are read for a token\n"
    )
    names = ["one call", "modules", *(["bf16 weights, fp32 products", "bf16 products"] if others else [])]
    say(
        "| context | rows | memory, GB/s | share of the limit | "
        + " | ".join(f"{name}, ms | over 1 row" for name in names)
        + " |"
    )
    say("|---" * (4 + 2 * len(names)) + "|")
    for context in options.contexts:
        first: list[float] = []
        for count in options.rows:
            ways = [(target, True), (target, False), *others]
            read, *times = timed(reading, ways, context, count, options.repeats)
            first, limit = first or times, size / reading.bytes * read
            each = (f"{its * 1e3:.2f} | {its / one:.2f}" for its, one in zip(times, first, strict=True))
            say(
                f"| {context} | {count} | {reading.bytes / read / 1e9:.1f} | {limit / times[0]:.0%} | "
                + " | ".join(each)
                + " |"
            )


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def weight_bytes(target: Target) -> int:
    """Bytes of the weights that a token's call reads: all but the embedding's rows, unless the head is the embedding."""
    head = target.head_weight_VD
    layers = (
        sum(p.numel() * p.element_size() for p in target.body.parameters()) - target.embedding_VD.numel() * 4
    )
    return layers + head.numel() * head.element_size()


class Reading:
    """A product of one row that reads a matrix which no cache holds: what the memory gives at the moment."""

    def __init__(self) -> None:
        self.weight, self.x = torch.ones(160_000, 1024), torch.ones(1, 1024)
        self.bytes = self.weight.numel() * 4

    def __call__(self) -> None:
        few_rows(self.x, self.weight)


def in_bf16(name: str) -> list[tuple[Target, bool]]:
    """A target's weights rounded to bf16: as decoding opens a checkpoint of them, multiplied in fp32, and with products in bf16."""
    rounded = load_target(name, dtype="bfloat16", device="cpu", decoding=True)
    with tempfile.TemporaryDirectory() as folder:
        load_target(name, dtype="bfloat16", device="cpu", fast=False).model.save_pretrained(folder)
        rounded.tokenizer.save_pretrained(folder)
        return [(load_target(folder, dtype="float32", device="cpu", decoding=True), True), (rounded, True)]


def timed(
    reading: Reading, ways: Sequence[tuple[Target, bool]], context: int, count: int, repeats: int
) -> list[float]:
    """Median seconds of the reading and of a call in each way, which take turns: a target, and whether its layers are one call. The
    context's keys are random."""
    tokens = torch.randint(4, ways[0][0].vocab_size - 1, (1, count))
    calls = [reading, *(prepared(target, fused, tokens, context) for target, fused in ways)]
    found = [[seconds(call) for call in calls] for _ in range(repeats + 1)][1:]
    return [statistics.median(its) for its in zip(*found, strict=True)]


def prepared(target: Target, fused: bool, tokens: Tensor, context: int) -> Callable[[], None]:
    """A call over `tokens` after a context of random keys, with a cache of its own."""
    layers, cache = target.fused, target.new_cache(1, context + tokens.shape[1])
    for slab in cache.slabs:
        slab.keys.normal_()
        slab.values.normal_()
    cache.advance(context)

    def call() -> None:
        target.fused = layers if fused else None
        try:
            target.forward(tokens, cache=cache)
        finally:
            target.fused = layers
        cache.length = context

    return call


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    cli(main)()
