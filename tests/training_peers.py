"""DFlash's recipe trained here and by the `speculators` package, over the same rows: positions a second and memory, side by side.

    pip install -e '.[peers]'
    python -m tests.training_peers                        # data.path=FOLDER where the target's text lies elsewhere

The target's outputs over the rows are computed once, in fp32, and read from disk by both. Ours: the run of `align.train` with
`target.parallel=absent`. Theirs: `speculators`' own DFlash network, built by its `from_training_args`, its loss (cross-entropy with
DFlash's decay; labels are the target's most likely tokens, which it computes in every step) and an epoch of its `Trainer`. Layers, widths,
taps, draft vocabulary, rows, anchors a row and positions a block are the recipe's in both, weights are random, products fp32, AdamW.

Every repeat is a process of its own with one thread, the ways in turns. Seconds are those of the processor (user and system), so a
machine that has other work counts less; positions are those that carry loss, each side's own count. No test runs this.

Three things of `speculators` (0.9.0) do not run on a CPU, and what stands in their place is its own: `simple_flex_attention` (torch: no
backward on a CPU) → its options `sdpa` and `eager`; fused losses (Triton) → its `eager` ones; `Trainer` asks for an accelerator →
`on_cpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from align.common.errors import UserError, cli
from align.common.provenance import package_versions
from align.common.text import say
from align.config.parser import load_recipe
from align.config.recipe import Recipe

OURS = "ours"
WAYS = {OURS: "", "speculators, sdpa": "sdpa", "speculators, eager": "eager"}
"""What is trained, and the attention of theirs."""
WARM = 2
"""Steps before those that are measured."""
PACKAGES = ("torch", "transformers", "lightning", "speculators")


@cli
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("words", nargs="*", help="keys of the recipe: data.path=…, trainer.anchors=… (200 where not given)")
    add("--recipe", default="recipes/compare/dflash_random.yaml")
    add("--steps", type=int, default=20, help=f"measured ones, after {WARM} others")
    add("--repeats", type=int, default=5)
    add("--out", type=Path, default=Path("runs/training_peers"))
    add("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker is None:
        run(options)
    elif options.worker == "rows":
        write_rows(options)
    else:
        found = (ours if options.worker == OURS else theirs)(options)
        (options.out / "found.json").write_text(json.dumps(found))


def run(options: argparse.Namespace) -> None:
    if package_versions(PACKAGES)["speculators"] is None:
        raise UserError("the speculators package is not installed: pip install -e '.[peers]'")
    started(options, "rows")
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    report = {"versions": package_versions(PACKAGES), "steps": options.steps, "found": found}
    for repeat in range(options.repeats):
        for way in list(WAYS)[:: 1 if repeat % 2 == 0 else -1]:
            started(options, way)
            last = json.loads((options.out / "found.json").read_text())
            found[way].append(last)
            say(f"{way}: {statistics.mean(last['seconds']):.2f} s a step", error=True)
        (options.out / "training_peers.json").write_text(json.dumps(report, indent=1) + "\n")
    say("\n".join(table(found)))
    say("\n" + ", ".join(f"{name} {version}" for name, version in report["versions"].items()))


def started(options: argparse.Namespace, worker: str) -> None:
    """This file in a process with one thread."""
    words = ["--recipe", options.recipe, "--steps", str(options.steps), "--out", str(options.out)]
    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "tests.training_peers", *options.words, *words, "--worker", worker]
    with (options.out / "log.txt").open("a") as log:
        code = subprocess.run(command, env={**os.environ, **alone}, stdout=log, stderr=log).returncode
    if code:
        raise UserError(f"{worker}: exit code {code}, see {options.out / 'log.txt'}")


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Medians over the repeats; [least, most]. Ratios are of the same repeat."""
    lines = [
        "| | positions a second of one core | ours, times theirs | seconds a step | positions a step | most memory in the steps, MiB | before the first step | trained parameters |",
        "|---|---|---|---|---|---|---|---|",
    ]
    speeds = {way: [sum(r["positions"]) / sum(r["seconds"]) for r in runs] for way, runs in found.items()}
    for way, runs in found.items():
        over = [a / b for a, b in zip(speeds[OURS], speeds[way], strict=True)]
        seconds = [statistics.mean(r["seconds"]) for r in runs]
        cells = [
            way,
            spread(speeds[way], 0),
            "" if way == OURS else spread(over, 2),
            spread(seconds, 2),
            f"{statistics.mean(runs[0]['positions']):.0f}",
            spread([r["peak"] for r in runs], 0),
            spread([r["before"] for r in runs], 0),
            f"{runs[0]['parameters'] / 1e6:.2f}M",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"


class Meter:
    """Seconds of the processor, positions and losses of the steps after the first `WARM`, and the memory that they take."""

    def __init__(self) -> None:
        self.steps, self._since = 0, 0.0
        self.seconds: list[float] = []
        self.positions: list[int] = []
        self.losses: list[float] = []
        self.before = memory("VmRSS")

    def step(self, positions: int, loss: float) -> None:
        """Called after every step."""
        now = time.process_time()
        self.steps += 1
        if self.steps > WARM:
            self.seconds.append(now - self._since)
            self.positions.append(positions)
            self.losses.append(loss)
        if self.steps == WARM:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # Linux counts the most memory anew
        self.peak = memory("VmHWM")
        self._since = time.process_time()

    def found(self, parameters: int) -> dict[str, Any]:
        return {**{k: v for k, v in vars(self).items() if k[0] != "_"}, "parameters": parameters}


def memory(name: str) -> float:
    """Of this process, resident, in MiB: VmRSS is what it has, VmHWM the most that it had."""
    status = Path("/proc/self/status")
    if not status.is_file():  # no Linux: the most of the whole run
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return int(re.search(rf"{name}:\s+(\d+) kB", status.read_text())[1]) / 2**10  # type: ignore[index]


def recipe_of(options: argparse.Namespace, *more: str) -> Recipe:
    """The recipe for so many steps, in fp32, over outputs that are stored."""
    steps = WARM + options.steps
    own = {
        "trainer.anchors": "200",
        "target.dtype": "float32",
        "trainer.precision": "fp32",
        "trainer.max_steps": str(steps),
        "trainer.warmup_steps": str(WARM),
        "trainer.validate_every": str(steps + 1),
        "trainer.validation_rows": "1",
        "trainer.checkpoint_every": str(steps + 1),
        "trainer.milestones": "[]",
        "trainer.keep_features_gb": "0",
        "trainer.features_gb": "4",
        "trainer.features_dtype": "fp32",
        "trainer.features_path": str(options.out / "features"),
        "trainer.resume": "never",
        "output": str(options.out / "run"),
        **dict(word.split("=", 1) for word in (*options.words, *more)),
    }
    return load_recipe([f"recipe={options.recipe}", *(f"{k}={v}" for k, v in own.items())])


def supply_of(recipe: Recipe, target: Any) -> Any:
    """The text of the recipe's folder, whoever wrote it: a target in bf16 wrote what fp32's is measured on."""
    from align.data.index import read_samples
    from align.data.packing import split_validation
    from align.data.supply import Supply

    samples = read_samples(recipe.data_folder, target.vocab_size)
    return Supply(recipe.data_folder, *split_validation(samples, recipe.data.validation_fraction))


# ---- the rows, once ----


def write_rows(options: argparse.Namespace) -> None:
    """The target's outputs over the rows of all steps, as both sides read them, and for theirs the target's embedding and norm."""
    import torch
    from safetensors.torch import save_file

    from align.data.packing import collate
    from align.diffusion.noise import may_anchor
    from align.outputs.cache import TargetOutputCache
    from align.target.loading import load_target
    from align.training.build import conditioning, draft_vocab
    from align.training.datamodule import validation_rows

    recipe = recipe_of(options)
    target = load_target(recipe.target.name, device="cpu", **recipe.target_options)
    config, supply = conditioning(recipe, target), supply_of(recipe, target)
    assert config is not None and config.sample_from_anchor
    stream = supply.stream(recipe)
    cache = TargetOutputCache(target, config, recipe.trainer, recipe.features_folder)
    for _, row in validation_rows(supply.validation, recipe.data.length, 1, supply.exact):
        cache.row(collate([row]), 1.0)  # a run ends with a validation, after what is measured
    last = config.num_target_layers - 1
    for step in range(recipe.trainer.max_steps):
        batch = collate([stream.row(stream.key(step))])
        features = cache.row(batch, recipe.objective.temperature).features
        with torch.no_grad():
            unnormed = target.forward(
                batch.tokens_BL,
                positions_BL=batch.positions_BL,
                mask=batch.attention_mask(),
                taps=[last],
                logits=False,
            ).taps_BLFD
        assert unnormed is not None and features.taps_BLFD is not None
        tensors = {
            "hidden_states": features.taps_BLFD.flatten(2),
            "verifier_last_hidden_states": unnormed[:, :, 0],
            "input_ids": batch.tokens_BL,
            "loss_mask": may_anchor(
                batch
            ),  # theirs counts and draws by the place that a row of a block reads
            "document_ids": batch.document_BL,
            "position_ids": batch.positions_BL,
        }
        save_file({k: v.contiguous() for k, v in tensors.items()}, options.out / f"row{step}.safetensors")
    cache.close()
    vocabulary = draft_vocab(recipe, target, supply, None)
    shape = {
        "taps": config.target_layer_ids,
        "layers": len(config.init_layer_ids),
        "rows": config.rows,
        "mask": config.mask_token_id,
        "vocabulary": list(range(config.vocab_size)) if vocabulary is None else vocabulary.tolist(),
    }
    (options.out / "shape.json").write_text(json.dumps(shape))
    write_target(target, options.out / "target")


def write_target(target: Any, folder: Path) -> None:
    """What theirs reads of the target: config, embedding, head and norm."""
    from safetensors.torch import save_file

    target.model.config.save_pretrained(folder)
    weights = {
        "model.embed_tokens.weight": target.embedding_VD,
        "lm_head.weight": target.head_weight_VD,
        "model.norm.weight": target.body.norm.weight,
    }
    copies = {k: v.detach().clone().contiguous() for k, v in weights.items()}
    save_file(copies, folder / "model.safetensors")


# ---- a training of each ----


def ours(options: argparse.Namespace) -> dict[str, Any]:
    import lightning

    from align.target.loading import load_target
    from align.training.build import KINDS, draft_vocab
    from align.training.datamodule import RowsModule
    from align.training.run import fit

    recipe = recipe_of(options, "target.parallel=absent")
    target = load_target(recipe.target.name, device="cpu", **recipe.target_options)
    supply, kind = supply_of(recipe, target), KINDS[recipe.drafter.kind]
    drafter = kind.make(target, recipe, draft_vocab(recipe, target, supply, None))
    rows = RowsModule(
        recipe, supply.stream(recipe), supply.validation, drafter.config.block_size, supply.exact
    )
    module = kind.module(drafter, recipe)

    class Steps(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.meter, self.positions = Meter(), 0  # by now the target's layers are given up

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            before, self.positions = self.positions, pl_module.progress.positions
            self.meter.step(int(self.positions - before), float(outputs["loss"]))

    steps = Steps()
    fit(recipe, module, rows, None, quiet=True, on_the_way=steps)
    return steps.meter.found(sum(p.numel() for p in module.trained().values()))


def their_network(options: argparse.Namespace) -> Any:
    """`speculators`' DFlash over the shapes of `write_rows`."""
    import torch
    from speculators.models.dflash import DFlashDraftModel
    from speculators.train.cli import create_transformer_layer_config

    folder, shape = str(options.out / "target"), json.loads((options.out / "shape.json").read_text())
    ids, every = torch.tensor(shape["vocabulary"]), range(shape["layers"])
    layers = create_transformer_layer_config(folder, len(every), "qwen3", None, 2048, list(every))
    t2d = torch.zeros(layers.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return DFlashDraftModel.from_training_args(
        layers,
        t2d,
        ids - torch.arange(len(ids)),
        verifier_name_or_path=folder,
        draft_vocab_size=len(ids),
        block_size=shape["rows"],
        sample_from_anchor=True,
        target_layer_ids=[i + 1 for i in shape["taps"]],
        mask_token_id=shape["mask"],
        draft_attn_impl=WAYS[options.worker],
    )


def theirs(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file
    from speculators.models.dflash import DFlashDraftModel
    from speculators.train.trainer import TrainerConfig
    from torch.utils.data import DataLoader

    recipe = recipe_of(options)
    torch.manual_seed(recipe.seed)
    model = their_network(options)
    call, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation="eager",
        per_position_loss_weight="fixed-exp-decay",
        dflash_decay_gamma=recipe.objective.decay,
        max_anchors=recipe.trainer.anchors,
    )

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return int(recipe.trainer.max_steps)

        def __getitem__(self, step: int) -> dict[str, Any]:
            return {**load_file(options.out / f"row{step}.safetensors"), "error_records": 0}

    trainer = on_cpu()(
        model,
        TrainerConfig(
            lr=recipe.trainer.learning_rate,
            num_epochs=1,
            save_path=str(options.out / "theirs"),
            train_call_kwargs=call,
            weight_decay=recipe.trainer.weight_decay,
            scheduler_type="cosine",
            scheduler_warmup_steps=recipe.trainer.warmup_steps,
            hidden_states_dtype=torch.float32,
            log_freq=sys.maxsize,
        ),
        DataLoader(Rows(), batch_size=None),
    )
    last: dict[str, float] = {}

    def keep(module: Any, inputs: Any, output: Any) -> None:
        metrics = output[2]
        last.update(positions=int(metrics["full_acc_total"]), loss=float(metrics["loss_sum"]))

    model.register_forward_hook(keep)
    meter = Meter()
    after: Callable[[], None] = lambda: meter.step(int(last["positions"]), last["loss"])  # noqa: E731
    trainer.train_epoch(0, step_callback=after)
    return meter.found(sum(p.numel() for p in model.parameters() if p.requires_grad))


def on_cpu() -> Any:
    """Their `Trainer`, which names a device by an accelerator's number, and waits for an accelerator where a step is logged: its first
    step always is, so it begins at the second."""
    from speculators.train.trainer import Trainer

    class OnCPU(Trainer):
        def setup_trainer(self) -> None:
            super().setup_trainer()
            self.local_rank = self.device_type = "cpu"
            self.global_step = 1

    return OnCPU


if __name__ == "__main__":
    main()
