"""Where a training step's time goes: a block drafter on a target with random weights and random text.

    python -m tools.gpu.train --shape 8b --out train.json               # a GPU
    python -m tools.gpu.train --shape 135m trainer.optimizer=muon       # options of align.train
    python -m tools.gpu.train --device cpu --shape debug

Anchors, losses and the step itself are those of align.train with recipe=smollm2_gpu (debug_block for
`debug`). Steps are timed without a profiler, then more of them with one. Operations are those of
matrix products.
"""

import tempfile
from collections import Counter
from contextlib import suppress
from time import perf_counter
from typing import Any

import lightning
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data.packing import RowStream, pack
from align.training.block_module import BlockDrafterModule
from align.training.datamodule import RowsModule
from align.training.run import fit
from specalign.common.schema import JsonObject
from specalign.common.text import markdown_table, say
from specalign.rows import shards
from tools.gpu.common import (
    device_name,
    make_drafter,
    make_parser,
    make_target,
    save_report,
    spread,
    synchronize,
)

PEAK_TFLOPS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0}
"""Of dense products in bf16, by a part of the device's name."""
WARM_UP = 5
PROFILED = 3
LOOPS = 3
SETTINGS = (
    "trainer.logger=[] trainer.resume=never trainer.validation_rows=1 trainer.warmup_steps=1 "
    "trainer.log_every={0} trainer.validate_every={0} trainer.checkpoint_every={0} trainer.max_steps={0} "
    "target.device={1}"
)
GROUPS = {
    "attention": "_scaled_dot _flash _efficient flash flex fmha",
    "optimizer": "Optimizer _foreach _fused_adam lerp addcmul addcdiv",
    "products": "mm addmm bmm baddbmm matmul linear einsum",
    "softmax": "_softmax softmax log_softmax _log_softmax logsumexp",
    "compiled": "triton Torch-Compiled CompiledFunction",
    "moving data": "copy _to_copy index gather scatter cat embedding clone fill zero masked sort topk",
    "element by element": "add mul sub rsub div pow sum mean silu where neg rsqrt exp log gt lt eq le ge max min",
}
"""Operators by the start of their names, the first that fits."""


class _Enough(Exception):
    """Ends the run: neither validation nor saving is measured."""


class StepMeter(lightning.Callback):
    """Times `LOOPS` loops of `steps` steps, and profiles `PROFILED` more."""

    def __init__(self, device: torch.device, steps: int) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.device, self.steps = device, steps
        self.profile = profile(activities=activities, with_flops=True)
        self.seconds: list[float] = []
        self.valid: list[torch.Tensor] = []

    @property
    def last(self) -> int:
        return WARM_UP + LOOPS * self.steps + PROFILED

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        done = index + 1 - WARM_UP
        if 0 < done <= LOOPS * self.steps:
            self.valid.append(batch.anchors.valid_BAK)  # counted later: the host would wait
        if done == LOOPS * self.steps + PROFILED:
            synchronize(self.device)
            self.profile.stop()
            raise _Enough
        if 0 <= done <= LOOPS * self.steps and done % self.steps == 0:
            synchronize(self.device)
            if done:
                self.seconds.append((perf_counter() - self._started) / self.steps)
            if done == LOOPS * self.steps:
                self.profile.start()
            self._started = perf_counter()

    def summarize(self, peak: float | None) -> JsonObject:
        events = [e for e in self.profile.key_averages() if not e.is_user_annotation]
        on_gpu = self.device.type == "cuda"
        shares: Counter[str] = Counter()
        for event in events:
            if event.device_type == DeviceType.CPU:
                time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
                shares[find_group(event.key)] += time
        ms = {name: value / 1e3 / PROFILED for name, value in shares.most_common()}
        seconds = spread(self.seconds)
        products = sum(e.flops or 0 for e in events if find_group(e.key) == "products")
        tflop = products / 1e12 / PROFILED
        positions = sum(int(valid.sum()) for valid in self.valid) / len(self.valid)
        figures: JsonObject = {
            "ms_per_step": {name: 1e3 * value for name, value in seconds.items()},
            "positions_per_step": positions,
            "positions_per_second": positions / seconds["median"],
            "tflop_per_step": tflop,
            "profiled_ms_by_group": ms,
        }
        if on_gpu:
            kernels = [e for e in events if e.device_type == DeviceType.CUDA]
            busy = sum(e.self_device_time_total for e in kernels) / 1e6 / PROFILED
            figures["device_busy"] = busy / seconds["median"]
        if peak is not None:
            figures["share_of_peak"] = tflop / seconds["median"] / peak
        return figures


def find_group(operator: str) -> str:
    name = operator.removeprefix("aten::")
    return next(
        (g for g, starts in GROUPS.items() if name.startswith(tuple(starts.split()))), "other"
    )


def find_peak(name: str) -> float | None:
    """TFLOP/s of a device; None = unknown."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def make_samples(recipe: Recipe, vocab_size: int) -> shards.ShardSamples:
    """Random tokens, enough for the rows of four steps."""
    length, generator = recipe.data.length // 2, torch.Generator().manual_seed(0)
    count = 8 * recipe.trainer.batch_size
    texts = list(torch.randint(4, vocab_size, (count, length), generator=generator))
    samples = shards.from_lists(texts, [length // 8] * count, [0.0, 1.0] * (count // 2))
    return shards.ShardSamples.of([samples])


def measure(shape: str, device: torch.device, steps: int, words: list[str]) -> StepMeter:
    meter = StepMeter(device, steps)
    name = "debug_block" if shape == "debug" else "smollm2_gpu"
    with tempfile.TemporaryDirectory() as folder, suppress(_Enough):
        fixed = SETTINGS.format(meter.last, device).split()
        recipe = load_recipe([f"recipe={name}", f"output={folder}", *fixed, *words])
        target = make_target(shape, device)
        if recipe.trainer.compile_target:
            target.compile_layers()
        drafter = make_drafter(target, recipe.drafter)
        samples = make_samples(recipe, target.vocab_size)
        stream = RowStream(pack(samples, recipe.data.length, 0), 0)
        rows = RowsModule(recipe, stream, samples, drafter.config.block_size)
        fit(BlockDrafterModule(drafter, recipe), rows, None, quiet=True, callback=meter)
    return meter


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("tools.gpu.train", __doc__ or "", "135m")
    parser.add_argument("--steps", type=int, default=10, help=f"in each of {LOOPS} timed loops")
    parser.add_argument("--peak-tflops", type=float, help="default: by the device's name")
    given, words = parser.parse_known_args(argv)
    peak = given.peak_tflops or find_peak(device_name(given.device))
    figures: JsonObject = {}
    for shape in given.shape:
        figures[shape] = measure(shape, given.device, given.steps, words).summarize(peak)
        save_report(given.out, given.device, {"training": figures})
        print_figures(shape, figures[shape])


def print_figures(shape: str, figures: JsonObject) -> None:
    ms = figures["ms_per_step"]
    say(f"{shape}: {ms['median']:.1f} ms a step ({ms['min']:.1f}…{ms['max']:.1f}), "
        f"{figures['positions_per_second']:,.0f} positions/s, {figures['tflop_per_step']:.3g} TFLOP a step")  # fmt: skip
    for name in ("device_busy", "share_of_peak"):
        if name in figures:
            say(f"{name.replace('_', ' ')}: {figures[name]:.1%}")
    by_group = figures["profiled_ms_by_group"]
    cells = [[g, f"{t:.2f}", f"{t / sum(by_group.values()):.0%}"] for g, t in by_group.items()]
    say(markdown_table(["operators", "ms a step, profiled", "share"], cells))


if __name__ == "__main__":
    main()
