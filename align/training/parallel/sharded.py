"""FSDP2 for the drafter's weights, gradients and optimizer state, and for the frozen target."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from specalign.common.batch import Batch
from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import TargetFeatures, target_features


class Sharded(ModelParallelStrategy):
    """FSDP2 over all processes. A checkpoint is one file, gathered on the main process: any number
    of processes can resume it. `offload`: keep weights and the optimizer's state in host memory."""

    def __init__(
        self, processes: int, backend: str | None, offload: bool, timeout: timedelta
    ) -> None:
        super().__init__(
            data_parallel_size=processes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
            timeout=timeout,
        )
        self.offload = offload

    def shard(self, module: nn.Module) -> None:
        """Shard a Lightning module layer by layer: each layer is gathered while it computes."""
        mesh = self.device_mesh["data_parallel"]
        pinned = mesh.device_type != "cpu"
        policy = CPUOffloadPolicy(pin_memory=pinned) if self.offload else OffloadPolicy()
        for layer in find_layers(module):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
            for method in getattr(layer, "FORWARDS", ()):
                register_fsdp_forward_method(layer, method)
        # the rest is used by more methods than forward: gather it for a whole step
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
        for method in ("training_step", "validation_step"):
            register_fsdp_forward_method(module, method)

    def model_to_device(self) -> None:
        """With offload, move only buffers to the device."""
        assert self.model is not None
        if not self.offload:
            super().model_to_device()
            return
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.root_device))


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


# ---- the frozen target: sharded too, or without its layers ----


def _move(target: Target, device: torch.device) -> None:
    """Move what is not sharded to the device, by copies that free mapped files and buffers."""
    places: dict[object, Tensor] = {}  # tied weights stay tied
    for tensor in (*target.model.parameters(), *target.model.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            data = tensor.data
            place = (data.data_ptr(), data.shape, data.stride())
            if place not in places:
                places[place] = data.to(device, copy=True)
            tensor.data = places[place]
    target.note_moved(device)


class AbsentTarget:
    """The frozen target without its layers, whose outputs are on disk. Keeps embedding and head."""

    def __init__(self, target: Target, device: torch.device, folder: Path) -> None:
        self.folder = folder
        target.hash  # noqa: B018 (cached before the weights are gone)
        target.unfuse()
        for layer in target.layers:
            layer.to("meta")
        _move(target, device)

    def features(self, target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
        """Raises UserError: the row is not on disk, or damaged."""
        raise UserError(
            f"target.parallel=absent: a training row is missing or damaged in {self.folder} "
            f"({command('align.features')} with this run's arguments, without target.parallel, "
            "stores it)"
        )

    def anywhere(self, mine: bool) -> bool:
        return mine


class SharedTarget:
    """The frozen target, sharded over the processes of a run: each layer is gathered for its
    forward pass over the process's own rows. Raises UserError: a target that can't be sharded."""

    def __init__(self, target: Target, device: torch.device) -> None:
        problem = ""
        if target.anatomy.recurrent:
            problem = "has recurrent states"
        elif target.anatomy.apart:  # processes would run the layers a different number of times
            problem = "has absolute positions, so texts run one by one"
        elif any(not p.is_floating_point() for p in target.model.parameters()):
            problem = "is quantised"
        if problem:
            given = f"target.parallel=fsdp: target {target.spec!r} {problem}"
            raise UserError(f"{given} (target.parallel=replicate)")
        self.device = device
        target.hash  # noqa: B018 (cached before the weights are gone)
        target.unfuse()
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in target.layers:
            fully_shard(layer, mesh=mesh)
        # their root prefetches the next layer; what the drafter reads is not sharded
        rest = {p for p in target.body.parameters() if not isinstance(p, DTensor)}
        fully_shard(target.body, mesh=mesh, ignored_params=rest)
        _move(target, device)

    def features(self, target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
        """`target_features` of this process's rows, called by all processes at once."""
        return target_features(target, batch, config)

    def anywhere(self, mine: bool) -> bool:
        """Whether it is true in any process."""
        flag = torch.tensor(int(mine), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
