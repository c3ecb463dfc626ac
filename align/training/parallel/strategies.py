"""Lightning strategies: DDP, FSDP2 and DeepSpeed's ZeRO. Only this file imports DeepSpeed."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import nn

from align.config.hardware import is_launched
from align.config.recipe import Recipe
from align.training.parallel.sharded import Sharded
from specalign.common.files import load_tensors, naming
from specalign.common.schema import JsonObject


def _on_cpu() -> bool:
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def _import_deepspeed() -> Any:
    """Late: it takes seconds, and other strategies do without."""
    import deepspeed

    return deepspeed


class Zero(DeepSpeedStrategy):
    """DeepSpeed's ZeRO, also with gloo on CPUs, which Lightning does not support."""

    def setup_environment(self) -> None:
        if not _on_cpu():
            super().setup_environment()
            return
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        if not _on_cpu():
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        # gloo's reductions: DeepSpeed compiles its own at the first start, and a kill meanwhile
        # leaves a lock at which all later starts wait forever
        ops = _import_deepspeed().ops
        getattr(ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0) if _on_cpu() else super().root_device

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> JsonObject:
        """As DeepSpeed's, which would unpickle any object, with `load_zero`."""
        self.deepspeed_engine.checkpoint_engine.load = load_zero
        return super().load_checkpoint(checkpoint_path, weights_only)

    @contextmanager
    def gather_parameters(self, parameters: list[nn.Parameter], write: bool) -> Iterator[None]:
        """Gather the full weights of ZeRO-3; with `write`, changes are scattered again."""
        if not self.zero_stage_3:
            yield
            return
        zero, rank = _import_deepspeed().zero, 0 if write else None
        with zero.GatheredParameters(parameters, modifier_rank=rank):
            yield


def load_zero(path: str, map_location: object = None) -> Any:
    """A file of a ZeRO checkpoint: tensors and DeepSpeed's own objects. Raises ForeignObject: it
    names another class or function."""
    from deepspeed.utils.tensor_fragment import fragment_address

    deepspeed = _import_deepspeed()
    stages = deepspeed.runtime.zero.config.ZeroStageEnum
    scaler = deepspeed.runtime.fp16.loss_scaler.LossScaler

    def member(kind: Any, name: str) -> object:
        if kind is not stages or name not in stages.__members__:
            raise UnpicklingError("GLOBAL getattr was not an allowed global")
        return stages[name]

    # some releases of Python 3.11 pickle an enum's member as getattr(its class, its name)
    allowed = (scaler, stages, fragment_address, (member, "builtins.getattr"))
    return load_tensors(Path(path), allowed, map_location=map_location)


class SafeCheckpoints(TorchCheckpointIO):
    """One-file checkpoints: read without unpickling objects, written in place."""

    def save_checkpoint(
        self, checkpoint: JsonObject, path: str | Path, storage_options: object = None
    ) -> None:
        """Lightning would write to the temporary folder first, which may be small."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with naming(Path(path)):
            Path(path).write_bytes(buffer.getbuffer())

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> JsonObject:
        return load_tensors(Path(path), map_location=map_location or "cpu")


def build_plugins(strategy: str) -> list[Any]:
    """The Trainer's plugins."""
    # whatever launcher started the processes set RANK, WORLD_SIZE and LOCAL_RANK as torchrun does
    environment: list[Any] = [TorchElasticEnvironment()] if is_launched() else []
    return environment + ([SafeCheckpoints()] if is_one_file(strategy) else [])


def build_strategy(recipe: Recipe, accelerator: str) -> Strategy | str:
    """The strategy of `launch.strategy` on `accelerator` (cpu or gpu)."""
    name, offload = recipe.launch.strategy, recipe.launch.offload
    backend = "gloo" if accelerator == "cpu" else None
    timeout = timedelta(seconds=recipe.launch.timeout)
    if name == "fsdp":
        if offload and backend is None:
            backend = "cpu:gloo,cuda:nccl"
        return Sharded(recipe.processes, backend, offload, timeout)
    if name.startswith("deepspeed"):
        if accelerator == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        share = recipe.trainer.batch_size // (recipe.trainer.accumulate * recipe.processes)
        stage = int(name[-1])
        zero = Zero(
            stage=stage,
            process_group_backend=backend,
            timeout=timeout,
            logging_batch_size_per_gpu=share,
            offload_optimizer=offload,
            offload_parameters=offload and stage == 3,
        )
        # torch's AdamW as elsewhere: DeepSpeed's is compiled at the first start and decays weights
        # differently
        assert zero.config is not None
        zero.config["zero_force_ds_cpu_optimizer"] = False
        return zero
    if name == "auto" and recipe.processes == 1:
        return "auto"
    return DDPStrategy(broadcast_buffers=False, timeout=timeout)


_LOST_PEER = ("onnection", "NCCL", "gloo", "roken pipe", "Socket", "imed out")


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective operation failed because another process ended or does not respond."""
    distributed = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return distributed and any(part in str(error) for part in _LOST_PEER)


def checkpoint_kind(recipe: Recipe) -> str:
    """The kind of checkpoint; runs can resume only from their own kind."""
    if recipe.launch.strategy == "fsdp":
        return "fsdp"
    if is_one_file(recipe.launch.strategy):
        return "one file"
    return f"{recipe.launch.strategy} on {recipe.processes} processes"


def is_one_file(strategy: str) -> bool:
    """Whether a checkpoint is one file of tensors, which is read without unpickling objects."""
    return not strategy.startswith("deepspeed")
