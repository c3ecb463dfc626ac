"""FSDP2 for the drafter: weights, gradients and the optimizer's state are sharded."""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor


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
