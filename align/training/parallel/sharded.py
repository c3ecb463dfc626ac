"""Weights in parts over the processes (FSDP2, `torch.distributed.fsdp.fully_shard`): the drafter's, its gradients and the optimizer's state."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS = ("training_step", "validation_step")
"""A module's methods that use its weights."""


class Sharded(ModelParallelStrategy):
    """FSDP2 over all processes. A checkpoint is one file, put together on the main process: any number of processes goes on from it.

    Args:
        offload: weights and the optimizer's state stay in the host's memory.
    """

    def __init__(self, processes: int, backend: str | None, offload: bool) -> None:
        super().__init__(
            data_parallel_size=processes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
        )
        self.offload = offload

    def shard(self, module: nn.Module) -> None:
        """Take a Lightning module's weights apart, each layer's for itself: one layer after the other is whole while it computes."""
        mesh = self.device_mesh["data_parallel"]
        pinned = mesh.device_type != "cpu"
        policy = CPUOffloadPolicy(pin_memory=pinned) if self.offload else OffloadPolicy()
        for layer in layers(module):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
            for method in getattr(layer, "FORWARDS", ()):
                register_fsdp_forward_method(layer, method)
        # outside of its layers a drafter is used by more methods than its forward: they are whole for a step
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
        for method in STEPS:
            register_fsdp_forward_method(module, method)

    def model_to_device(self) -> None:
        """Parts have their place; what is no parameter goes to the device."""
        assert self.model is not None
        if not self.offload:
            super().model_to_device()
            return
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.root_device))


def layers(module: nn.Module) -> list[nn.Module]:
    """The members of a network's outermost lists of modules."""
    found: list[nn.Module] = []
    for child in module.children():
        found += list(child) if isinstance(child, nn.ModuleList) else layers(child)
    return found


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from its parts; all processes ask for it at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def put(mine: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, the same in every process, into `mine`, which may be a part."""
    if isinstance(mine, DTensor):
        value = distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements)
    mine.copy_(value)
