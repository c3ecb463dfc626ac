"""The recipe's sections `trainer` and `launch`."""

from dataclasses import dataclass
from typing import Literal

from align.config.data import check_writer, server_address
from align.config.option import Section, option, require


@dataclass
class TrainerConfig(Section):
    """The optimisation."""

    max_steps: int = option(1000, "optimizer steps", low=1)
    batch_size: int = option(2, "packed rows per step, over all devices", low=1)
    anchors: int = option(256, "random anchors per row, at most all positions", low=1)
    optimizer: Literal["adamw", "muon"] = option("adamw", "muon = Muon for the layers' matrices")
    learning_rate: float = option(8e-4, "peak learning rate of AdamW", above=0, high=100)
    muon_learning_rate: float = option(1e-2, "peak rate of Muon's matrices", above=0, high=100)
    min_learning_rate_ratio: float = option(0.05, "final rate / peak rate", low=0, high=1)
    warmup_steps: int = option(50, "linear warm-up", low=0)
    weight_decay: float = option(0.01, "AdamW's decoupled weight decay", low=0)
    betas: list[float] = option([0.9, 0.98], "betas of AdamW", low=0, high=0.99999)
    gradient_clip: float = option(1.0, "maximum gradient norm; 0 = no clipping", low=0)
    accumulate: int = option(1, "micro-batches per step; batch_size is split over them", low=1)
    ema: float = option(0.0, "EMA decay of the weights; 0 = off", low=0, high=0.99999)
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "compute type; auto = bf16 if the target is in half precision, else fp32"
    )
    compile_target: bool = option(
        False, "compile the target's layers: minutes at the start, then shorter steps on a GPU"
    )
    validate_first: bool = option(False, "validate once before the first step")
    validate_every: int = option(200, "steps between validations", low=1)
    validation_rows: int = option(16, "packed rows to validate on", low=1)
    checkpoint_every: int = option(200, "steps between checkpoints", low=1)
    milestones: list[int] = option([], "text token counts at which to also save a drafter", low=1)
    keep_checkpoints: int = option(2, "checkpoints to keep", low=1)
    resume: str = option("auto", "auto = newest complete checkpoint, never, or a path")
    keep_features_gb: float = option(0.0, "memory for target outputs, GB per process", low=0)
    features_gb: float = option(0.0, "disk for target outputs, GB in total; 0 = off", low=0)
    features_path: str | None = option(None, "folder of stored outputs; null = OUTPUT/features")
    features_dtype: Literal["fp16", "bf16", "fp32"] = option("fp16", "type of stored outputs")
    features_writer: str = option(
        "target", "target = outputs computed here; vllm:URL = by a server that returns its states"
    )
    features_ahead: int = option(
        4, "micro-batches requested from that server at once, the next one included", low=1
    )
    logger: list[Literal["csv", "tensorboard", "wandb"]] = option(
        ["csv"], "csv, tensorboard, wandb"
    )
    log_every: int = option(10, "steps between progress lines", low=1)
    max_minutes: float | None = option(
        None, "time limit; the learning rate decays by then", above=0
    )

    @property
    def keeps_outputs(self) -> bool:
        """Whether the target's outputs are kept in memory or on disk."""
        return bool(self.keep_features_gb or self.features_gb)

    @property
    def features_server(self) -> str | None:
        """The address of the server that runs the target, without `/v1`; None = it runs here."""
        return server_address(self.features_writer)

    def validate(self) -> None:
        warmup = f"trainer.warmup_steps={self.warmup_steps} must be at most trainer.max_steps="
        require(self.warmup_steps <= self.max_steps, f"{warmup}{self.max_steps}")
        require(len(self.betas) == 2, f"trainer.betas={self.betas} must be two numbers")
        require(self.resume.strip(), "trainer.resume must be auto, never or a checkpoint's path")
        check_writer("trainer.features_writer", self.features_writer, "vllm")


@dataclass
class LaunchConfig(Section):
    """Processes and devices."""

    strategy: Literal["auto", "ddp", "fsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3"] = option(
        "auto", "auto = ddp on several devices, fsdp = FSDP2, deepspeed_N = ZeRO-N"
    )
    offload: bool = option(
        False, "DeepSpeed: optimizer states in host memory, with deepspeed_3 also the weights"
    )
    devices: int = option(1, "processes on each machine", low=1)
    num_nodes: int = option(1, "number of machines", low=1, high=10_000)
    timeout: float = option(600.0, "seconds to wait for other processes", low=1)

    def validate(self) -> None:
        sharded = f"launch.offload=true needs launch.strategy=deepspeed_N, not {self.strategy}"
        require(not self.offload or self.strategy.startswith("deepspeed"), sharded)
