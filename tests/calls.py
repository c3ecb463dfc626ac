"""What one call of a target costs on this machine: rows by context, its layers in one call and through its modules, interleaved,
beside the time that reading its weights takes.

python -m tests.calls                                     # SmolLM2-135M-Instruct
python -m tests.calls --target debug --contexts 128       # what is not arithmetic

A speed is worth something on an idle machine alone. No test runs this.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from align.common.errors import cli
from align.common.text import say
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
    options = parser.parse_args()
    target = load_target(options.target, dtype="float32", device="cpu")
    size = weight_bytes(target)
    bandwidth = read_bandwidth()
    limit = size / bandwidth
    say(f"{options.target}, fp32, {torch.get_num_threads()} threads; {size / 1e6:.0f} MB are read for a token; memory reads at "
          f"{bandwidth / 1e9:.1f} GB/s: {limit * 1e3:.1f} ms at least, {1 / limit:.1f} tokens/s at most\n")  # fmt: skip
    say(
        "| context | rows | one call, ms | share of the limit | over 1 row | modules, ms | over 1 row |\n|---|---|---|---|---|---|---|"
    )
    for context in options.contexts:
        first: list[float] = []
        for count in options.rows:
            times = timed(target, context, count, options.repeats)
            first = first or times
            fused, modules = times
            say(f"| {context} | {count} | {fused * 1e3:.2f} | {limit / fused:.0%} | {fused / first[0]:.2f} | {modules * 1e3:.2f} | "
                  f"{modules / first[1]:.2f} |")  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def weight_bytes(target: Target) -> int:
    """Bytes of the weights that a token's call reads: all but the embedding's rows, unless the head is the embedding."""
    head = target.head_weight_VD
    layers = (
        sum(p.numel() * p.element_size() for p in target.body.parameters()) - target.embedding_VD.numel() * 4
    )
    return layers + head.numel() * head.element_size()


def read_bandwidth() -> float:
    """Bytes a second at which a product of one row reads a matrix that no cache holds: the best of several."""
    from align.kernels.linear import few_rows

    weight, x = torch.ones(160_000, 1024), torch.ones(1, 1024)
    return weight.numel() * 4 / min(seconds(lambda: few_rows(x, weight)) for _ in range(9))


def timed(target: Target, context: int, count: int, repeats: int) -> list[float]:
    """Median seconds of a call with and without its layers in one call, in turn. The context's keys are random."""
    fused, cache = target.fused, target.new_cache(1, context + count)
    for slab in cache.slabs:
        slab.keys.normal_()
        slab.values.normal_()
    cache.advance(context)
    tokens = torch.randint(4, target.vocab_size - 1, (1, count))
    found: list[list[float]] = [[], []]

    def call() -> None:
        target.forward(tokens, cache=cache)
        cache.length = context

    try:
        for _ in range(repeats + 1):
            for way, its in zip((fused, None), found, strict=True):
                target.fused = way
                its.append(seconds(call))
    finally:
        target.fused = fused
    return [statistics.median(its[1:]) for its in found]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    cli(main)()
