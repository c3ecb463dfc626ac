"""The recipe: everything a run depends on, as dataclasses that validate themselves.

`align.config.parser` fills them; `--help` is made from their fields."""

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

    name: str = option(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "Hub id, model folder, FILE.gguf, or debug"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "weights and compute; auto = bf16 where the hardware supports it, else float32"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    revision: str | None = option(None, "hub revision: branch, tag or commit")
    trust_remote_code: bool = option(False, "run modeling code that comes with the model")
    parallel: Literal["replicate", "fsdp"] = option(
        "replicate", "in training: a copy in each process, or layers sharded over them (FSDP2)"
    )

    def validate(self) -> None:
        require(self.name.strip(), "target.name must not be empty")
        is_device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        require(is_device, f"target.device={self.device!r} must be auto, cpu, cuda or cuda:N")


@dataclass
class Recipe(Section):
    """One run."""

    name: str = option("unnamed", "recipe name; default: the file name")
    base: str | None = option(None, "recipe (name or path) to inherit from")
    stage: Literal["pretrain", "finetune", "calibrate"] = option(
        "calibrate",
        "pretrain = whole rows, finetune = blocks, calibrate = blocks, with distillation",
    )
    seed: int = option(0, "seed of data, initialization and order", low=0, high=2**32 - 1)
    output: str = option("", "output folder; default: runs/NAME")
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def validate(self) -> None:
        """Check values of different sections against each other."""
        d, t, launch = self.drafter, self.trainer, self.launch
        is_file_name = self.name not in ("", ".", "..") and "/" not in self.name
        require(is_file_name, f"name={self.name!r} must be a file name")
        require(
            d.block_size < self.data.length,
            f"drafter.block_size={d.block_size} must be less than data.length={self.data.length}",
        )
        kind = f"stage={self.stage}: drafter.kind={d.kind} needs stage=calibrate"
        require(d.standalone or self.stage == "calibrate", kind)
        decay = f"objective.prefix_decay={self.objective.prefix_decay} needs drafter.kind=block"
        require(d.kind == "block" or self.objective.prefix_decay == 0, decay)
        both = "set both objective.terms.confidence and drafter.confidence_head=true, or neither"
        require(d.confidence_head == ("confidence" in self.objective.terms), both)
        if t.optimizer == "muon":
            sharded = f"does not support launch.strategy={launch.strategy}; use auto or ddp"
            require(launch.strategy in ("auto", "ddp"), f"trainer.optimizer=muon {sharded}")
            require(d.lora_rank == 0, "trainer.optimizer=muon needs drafter.lora_rank=0")
        require(
            t.batch_size % (t.accumulate * self.processes) == 0,
            f"trainer.batch_size={t.batch_size} must be a multiple of trainer.accumulate="
            f"{t.accumulate} times the {self.processes} processes of launch.devices",
        )
        one = f"target.device={self.target.device} is one GPU, but launch.devices={launch.devices}"
        require(":" not in self.target.device or launch.devices == 1, one)
        several = "target.parallel=fsdp needs several processes (launch.devices)"
        is_sharded = self.target.parallel == "fsdp"
        require(not is_sharded or self.processes > 1, several)
        whole = "trainer.compile_target=true needs target.parallel=replicate"
        require(not (is_sharded and t.compile_target), whole)
        alone = "trainer.features_writer=vllm:URL needs target.parallel=replicate, "
        alone += "trainer.compile_target=false, trainer.features_gb=0, trainer.keep_features_gb=0"
        runs_layers = is_sharded or t.compile_target or t.keeps_outputs
        require(t.features_server is None or not runs_layers, alone)

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
        chat = {"template_kwargs": self.data.template_kwargs, "system": self.data.system}
        names = ("dtype", "revision", "trust_remote_code")
        return {name: getattr(self.target, name) for name in names} | chat

    @property
    def features_folder(self) -> Path:
        """`trainer.features_path`, or `features` in the output folder."""
        return Path(self.trainer.features_path or Path(self.output) / "features")


Values = dict[str, object]  # values by key
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
    sections = get_type_hints(Recipe)
    for group in GROUPS:
        section = sections[group] if group else Recipe
        types = get_type_hints(section)
        for f in fields(section):
            if f.metadata:  # not a section of the recipe
                default = f.default if f.default_factory is MISSING else f.default_factory()
                name = f"{group}.{f.name}".removeprefix(".")
                found[name] = Key(name, types[f.name], default, f.metadata["doc"])
    return found


def resolve(recipe: Recipe) -> Values:
    """The recipe as plain values, every key present: feeding it back in gives the same recipe."""
    return {key: value for key, value in asdict(recipe).items() if key != "base"}
