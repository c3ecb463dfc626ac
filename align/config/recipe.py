"""The recipe: everything a run depends on, as dataclasses that validate themselves.

`align.config.parser` fills them from YAML and key=value. `--help` is made from the fields. No torch
here.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Literal, get_type_hints

from align.config.data import DataConfig
from align.config.drafter import DrafterConfig, ObjectiveConfig
from align.config.option import Section, option, require
from align.config.trainer import LaunchConfig, TrainerConfig
from specalign.common.schema import JsonObject


@dataclass
class TargetConfig(Section):
    """The target language model."""

    SECTION = "target"

    name: str = option(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "hub id, hub folder, FILE.gguf, or debug"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "type of weights and compute; auto = bf16 where the hardware supports it, else float32",
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    revision: str | None = option(None, "hub revision: branch, tag or commit")
    trust_remote_code: bool = option(False, "run modelling code that comes with the model")
    parallel: Literal["replicate", "fsdp", "absent"] = option(
        "replicate",
        "in training: a copy in each process, sharded layers (FSDP2), or no "
        "layers: their outputs are read from trainer.features_path (align.features)",
    )

    def validate(self) -> None:
        require(self.name.strip(), "target.name must not be empty")
        is_device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        require(is_device, f"target.device={self.device!r} must be auto, cpu, cuda or cuda:N")


@dataclass
class Recipe(Section):
    """One run."""

    name: str = option("unnamed", "the recipe's name; the file's, unless given")
    base: str | None = option(
        None, "in a file: the recipe (a name, or a path relative to that file) to start from"
    )
    stage: Literal["pretrain", "finetune", "calibrate"] = option(
        "calibrate",
        "pretrain = whole rows, finetune = blocks behind clean prefixes, both by the diffusion "
        "loss; calibrate = blocks, with "
        "the distillation terms (block and autoregressive drafters are calibrated)",
    )
    seed: int = option(0, "seed of data, initialisation and order", low=0, high=2**32 - 1)
    output: str = option("", "output folder; default: runs/NAME")
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def validate(self) -> None:
        """Check values of different sections against each other."""
        d, length = self.drafter, self.data.length
        is_file_name = self.name not in ("", ".", "..") and "/" not in self.name
        require(is_file_name, f"name={self.name!r} must be a file name")
        size = f"drafter.block_size={d.block_size}"
        require(d.block_size < length, f"{size} must be less than data.length={length}")
        self._validate_devices()
        self._validate_objective()
        self._validate_target_outputs()
        self._validate_optimizer()

    def _validate_devices(self) -> None:
        launch, device = self.launch, f"target.device={self.target.device}"
        kind, _, number = self.target.device.partition(":")
        excluded = {"cpu": "gpu", "cuda": "cpu"}.get(kind)
        contradiction = f"{device} contradicts launch.accelerator={launch.accelerator}"
        require(launch.accelerator != excluded, f"{contradiction}; leave it at auto")
        one = f"{device} names one GPU, launch.devices={launch.devices}"
        require(not number or launch.devices == 1, one)

    def _validate_objective(self) -> None:
        d, o, stage = self.drafter, self.objective, f"stage={self.stage}"
        is_calibrated = self.stage == "calibrate"
        kind = f"{stage}: drafter.kind={d.kind} needs stage=calibrate"
        require(d.standalone or is_calibrated, kind)
        decay = f"objective.prefix_decay={o.prefix_decay}"
        require(d.kind == "block" or o.prefix_decay == 0, f"{decay} needs drafter.kind=block")
        require(
            d.confidence_head == ("confidence" in o.terms),
            "objective.terms.confidence and drafter.confidence_head=true need each other",
        )
        lengths = f"objective.block_lengths has {len(o.block_lengths)} entries"
        fits = len(o.block_lengths) in (0, d.block_size)
        require(fits, f"{lengths} for drafter.block_size={d.block_size}")

    def _validate_target_outputs(self) -> None:
        how = self.target.parallel
        key = f"target.parallel={how}"
        several = f"{key} needs several processes (launch.devices)"
        require(how != "fsdp" or self.processes > 1, several)
        stored = f"{key} reads what align.features stored: give trainer.features_gb"
        require(how != "absent" or self.trainer.features_gb, stored)

    def _validate_optimizer(self) -> None:
        t, strategy = self.trainer, self.launch.strategy
        if t.optimizer == "muon":
            whole = "trainer.optimizer=muon needs whole matrices"
            require(strategy in ("auto", "ddp"), f"{whole}: launch.strategy={strategy} shards them")
            require(self.drafter.lora_rank == 0, f"{whole}: drafter.lora_rank=0")
        shares = t.accumulate * self.processes
        require(
            t.batch_size % shares == 0,
            f"trainer.batch_size={t.batch_size} must be a multiple of trainer.accumulate="
            f"{t.accumulate} times the {self.processes} processes of launch.devices",
        )

    @property
    def processes(self) -> int:
        """Training processes over all machines."""
        return self.launch.devices * self.launch.num_nodes

    @property
    def data_folder(self) -> Path:
        """`data.path`, or `data` in the output folder."""
        return Path(self.data.path) if self.data.path else Path(self.output) / "data"

    @property
    def target_options(self) -> JsonObject:
        """Arguments of `load_target` besides the target's name and the device."""
        t, d = self.target, self.data
        return {
            "dtype": t.dtype,
            "revision": t.revision,
            "trust_remote_code": t.trust_remote_code,
            "template_kwargs": d.template_kwargs,
            "system": d.system,
        }

    @property
    def features_folder(self) -> Path:
        """`trainer.features_path`, or `features` in the output folder."""
        return Path(self.trainer.features_path or Path(self.output) / "features")


Values = dict[str, object]
"""Values by key."""
GROUPS = ("", "target", "data", "drafter", "objective", "trainer", "launch")


@dataclass(frozen=True)
class Key:
    """One settable key: its dotted name, type, default and documentation."""

    name: str
    type: object
    default: object
    doc: str


@cache
def keys() -> dict[str, Key]:
    """All settable keys by dotted name, in the order of the dataclasses."""
    found: dict[str, Key] = {}
    hints = get_type_hints(Recipe)
    for group in GROUPS:
        cls = Recipe if group == "" else hints[group]
        types = get_type_hints(cls)
        for f in fields(cls):
            if group == "" and f.name in GROUPS:
                continue
            factory = f.default_factory
            default = f.default if factory is MISSING else factory()
            name = f"{group}.{f.name}" if group else f.name
            found[name] = Key(name, types[f.name], default, f.metadata["doc"])
    return found


def resolve(recipe: Recipe) -> Values:
    """The recipe as plain values, every key present: feeding it back in gives the same recipe."""
    return {key: value for key, value in asdict(recipe).items() if key != "base"}
