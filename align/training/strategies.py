"""Training over several processes: DDP, FSDP2 and DeepSpeed's ZeRO as Lightning strategies, and the
frozen target in shards. Only this file imports DeepSpeed."""

import io
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from align.config.hardware import is_launched
from align.config.recipe import Recipe
from specalign.common.errors import UserError
from specalign.common.files import load_tensors, naming
from specalign.common.schema import JsonObject
from specalign.lm.model import Target


def build_strategy(recipe: Recipe, accelerator: str) -> Strategy | str:
    """The strategy of `launch.strategy` on `accelerator` (cpu or gpu)."""
    name, offload = recipe.launch.strategy, recipe.launch.offload
    backend = "gloo" if accelerator == "cpu" else None
    timeout = timedelta(seconds=recipe.launch.timeout)
    if name == "fsdp":
        return Sharded(
            data_parallel_size=recipe.processes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
            timeout=timeout,
        )
    if not is_one_file(name):
        if accelerator == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        share = recipe.trainer.batch_size // (recipe.trainer.accumulate * recipe.processes)
        zero = Zero(
            stage=int(name[-1]),
            process_group_backend=backend,
            timeout=timeout,
            logging_batch_size_per_gpu=share,
            offload_optimizer=offload,
            offload_parameters=offload and name == "deepspeed_3",
        )
        # torch's AdamW as elsewhere: DeepSpeed's is compiled at the first start and decays weights
        # differently
        assert zero.config is not None
        zero.config["zero_force_ds_cpu_optimizer"] = False
        return zero
    if name == "auto" and recipe.processes == 1:
        return "auto"
    return DDPStrategy(broadcast_buffers=False, timeout=timeout)


def build_plugins(strategy: str) -> list[Any]:
    # whatever launcher started the processes set RANK, WORLD_SIZE and LOCAL_RANK as torchrun does
    environment: list[Any] = [TorchElasticEnvironment()] if is_launched() else []
    return environment + ([OneFile()] if is_one_file(strategy) else [])


def is_one_file(strategy: str) -> bool:
    """Whether a checkpoint is one file of tensors, which is read without unpickling objects."""
    return not strategy.startswith("deepspeed")


def checkpoint_kind(recipe: Recipe) -> str:
    """The kind of checkpoint; runs can resume only from their own kind."""
    name = recipe.launch.strategy
    if is_one_file(name):
        return "fsdp" if name == "fsdp" else "one file"
    return f"{name} on {recipe.processes} processes"


# ---- FSDP2 ----


class Sharded(ModelParallelStrategy):
    """FSDP2 over all processes. A checkpoint is one file, gathered on the main process: any number
    of processes can resume it."""

    def shard(self, module: nn.Module) -> None:
        """Shard a Lightning module layer by layer: each layer is gathered while it computes, in
        mixed precision in 16 bits. Gradients are summed in fp32."""
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy()
        if self.precision_plugin.precision == "bf16-mixed":
            # autocast casts the inputs, where an operator computes in 16 bits
            policy = MixedPrecisionPolicy(
                torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        for layer in find_layers(module):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
            for method in getattr(layer, "FORWARDS", ()):
                register_fsdp_forward_method(layer, method)
        # the rest is used by more methods than forward: gather it for a whole step
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        for method in ("training_step", "validation_step"):
            register_fsdp_forward_method(module, method)


def find_layers(module: nn.Module) -> list[nn.Module]:
    """The members of a network's outermost module lists."""
    found: list[nn.Module] = []
    for child in module.children():
        found += list(child) if isinstance(child, nn.ModuleList) else find_layers(child)
    return found


def gather(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; a collective operation."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_into(mine: Tensor, value: Tensor) -> None:
    """Copy a full tensor, the same in every process, into `mine`, which may be a DTensor."""
    if isinstance(mine, DTensor):
        value = distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements)
    mine.copy_(value)


# ---- the frozen target, with `target.parallel=fsdp` ----


def shard_target(target: Target, device: torch.device) -> None:
    """Shard the frozen target over the processes of a run: each layer is gathered for its forward
    pass over the process's own rows, which all run at once. Raises UserError: a target that can't
    be sharded."""
    problem = ""
    if target.anatomy.recurrent:
        problem = "has recurrent states"
    elif target.anatomy.apart:  # processes would run the layers a different number of times
        problem = "has absolute positions, so texts run one by one"
    elif any(not p.is_floating_point() for p in target.model.parameters()):
        problem = "is quantized"
    if problem:
        given = f"target.parallel=fsdp: target {target.spec!r} {problem}"
        raise UserError(f"{given} (target.parallel=replicate)")
    target.hash  # noqa: B018 (cached before the weights are gone)
    target.unfuse()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in target.layers:
        fully_shard(layer, mesh=mesh)
    # their root prefetches the next layer; what the drafter reads is not sharded
    rest = {p for p in target.body.parameters() if not isinstance(p, DTensor)}
    fully_shard(target.body, mesh=mesh, ignored_params=rest)
    # by copies, which free mapped files and buffers
    places: dict[object, Tensor] = {}  # tied weights stay tied
    for tensor in (*target.model.parameters(), *target.model.buffers()):
        if not isinstance(tensor, DTensor):
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if place not in places:
                places[place] = tensor.data.to(device, copy=True)
            tensor.data = places[place]
    target.note_moved(device)


def is_true_anywhere(mine: bool, device: torch.device) -> bool:
    """Whether it is true in any process."""
    flag = torch.tensor(int(mine), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


# ---- DeepSpeed ----


def _import_deepspeed() -> Any:
    """Late: it takes seconds, and other strategies do without."""
    import deepspeed

    return deepspeed


class Zero(DeepSpeedStrategy):
    """DeepSpeed's ZeRO, also with gloo on CPUs, which Lightning does not support."""

    def setup_environment(self) -> None:
        # Lightning's own refuses CPUs, and so does the next one
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        # gloo's reductions: DeepSpeed compiles its own at the first start, and a kill meanwhile
        # leaves a lock at which all later starts wait forever
        ops = _import_deepspeed().ops
        getattr(ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
        return torch.device("cpu", 0) if on_cpu else super().root_device

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> JsonObject:
        """As DeepSpeed's, which would unpickle any object, with `load_zero`."""
        self.deepspeed_engine.checkpoint_engine.load = load_zero
        return super().load_checkpoint(checkpoint_path, weights_only)

    def gather_parameters(
        self, parameters: list[nn.Parameter], write: bool
    ) -> AbstractContextManager[None]:
        """Gather the full weights of ZeRO-3; with `write`, changes are scattered again."""
        zero, rank = _import_deepspeed().zero, 0 if write else None
        found: AbstractContextManager[None] = zero.GatheredParameters(
            parameters, modifier_rank=rank, enabled=self.zero_stage_3
        )
        return found


def load_zero(path: str, map_location: object = None) -> Any:
    """A file of a ZeRO checkpoint: tensors and DeepSpeed's own objects. Raises UserError: it
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


class OneFile(TorchCheckpointIO):
    """Checkpoints of one file, written in place: Lightning would write to the temporary folder
    first, which may be small. The Trainer reads them without unpickling objects."""

    def save_checkpoint(
        self, checkpoint: JsonObject, path: str | Path, storage_options: object = None
    ) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with naming(Path(path)):
            Path(path).write_bytes(buffer.getbuffer())
