"""What the measurements on a GPU share: arguments, models with random weights, timing, the report."""

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from align.config.drafter import DrafterConfig
from align.makers.block import block_config
from decode.captured.graph import CudaGraph
from specalign.common.errors import nearest
from specalign.common.schema import JsonObject
from specalign.lm.debug import debug_model
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.models.block import BlockDrafter


class ModelSize(NamedTuple):
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def products(self) -> list[tuple[int, int]]:
        """(out, in) of a layer's matrices: q, k, v, o, gate, up, down."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(query, self.hidden), (key, self.hidden), (key, self.hidden)]
        attention.append((self.hidden, query))
        return [*attention, *2 * [(self.inner, self.hidden)], (self.hidden, self.inner)]


SHAPES = {
    "debug": ModelSize(64, 128, 2, 4, 2, 16, 512),
    "135m": ModelSize(576, 1536, 30, 9, 3, 64, 49152),  # SmolLM2-135M
    "1b": ModelSize(2048, 8192, 16, 32, 8, 64, 128256),  # Llama-3.2-1B
    "8b": ModelSize(4096, 14336, 32, 32, 8, 128, 128256),  # Llama-3.1-8B
}


class RandomTarget(Target):
    hash = "0" * 64  # instead of reading all weights


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@torch.no_grad()
def make_target(shape: str, device: torch.device) -> Target:
    """A Llama with random weights, made on the device. It counts: after token i, i + 1 is by far the
    most probable, so that rounding does not change its text."""
    size = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=131072,
        initializer_range=0.1 * size.hidden**-0.5,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype_on(device), attn_implementation="eager"
        )
    embedding_VD = model.get_input_embeddings().weight.normal_()
    model.get_output_embeddings().weight.copy_(embedding_VD.roll(1, 0))
    _, tokenizer = debug_model("Llama")
    target = RandomTarget(model, tokenizer, ModelSource("random"), fast=False)
    target.eos_ids = ()
    return target


@torch.no_grad()
def make_drafter(target: Target, options: DrafterConfig) -> BlockDrafter:
    """A block drafter with random weights in fp32."""
    count = min(options.draft_vocab, target.vocab_size) or target.vocab_size
    with target.device:
        ids = torch.arange(count)
        drafter = BlockDrafter(block_config(target, options, ids), target, ids)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, 0.02)
    return drafter


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_us(function: Callable[[], object], device: torch.device, seconds: float = 0.01) -> float:
    """Microseconds of a call, launches included: the median of five loops of about `seconds`, on a
    CPU a tenth of that."""

    def run(count: int) -> float:
        synchronize(device)
        started = perf_counter()
        for _ in range(count):
            function()
        synchronize(device)
        return (perf_counter() - started) / count

    if device.type == "cpu":
        seconds /= 10
    run(2)
    count = max(1, min(10_000, int(seconds / run(1))))
    return 1e6 * median(run(count) for _ in range(5))


@torch.no_grad()
def kernel_us(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Microseconds of one of these calls, run in turn in a CUDA graph, where launches hardly count.
    Calls on different memory show uncached reads. On a CPU as `time_us`."""
    in_turn = [*calls] * max(1, 20 // len(calls))

    def run() -> None:
        for call in in_turn:
            call()

    replay = run if device.type == "cpu" else CudaGraph(run).replay
    return time_us(replay, device) / len(in_turn)


def spread(values: Sequence[float]) -> JsonObject:
    return {"min": min(values), "median": median(values), "max": max(values)}


def make_parser(module: str, about: str, shapes: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"python -m {module}", description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", type=torch.device, help="cpu, cuda or cuda:N")
    add_names(parser, "--shape", SHAPES, shapes)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures")
    return parser


def add_names(
    parser: argparse.ArgumentParser, option: str, known: Collection[str], default: str
) -> None:
    """An option that takes names, with commas between them."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown{nearest(name, known)}")
        return names

    about = f"of {', '.join(known)}; default {default}"
    parser.add_argument(option, type=read, default=default, metavar="NAMES", help=about)


def split_numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def device_name(device: torch.device) -> str:
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_gpu else device.type.upper()


def save_report(path: Path | None, device: torch.device, figures: JsonObject) -> None:
    report = {"device": device_name(device), "torch": torch.__version__, **figures}
    if path is not None:
        path.write_text(json.dumps(report, indent=1))
