"""Weights in parts over the processes: the drafter's, with gradients and the optimizer's state (FSDP2), and the frozen target's (FSDP2
or tensor parallelism).

FSDP2 is `torch.distributed.fsdp.fully_shard`. Tensor parallelism follows the plan that transformers has for an architecture.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from align.common.batch import Batch
from align.common.commands import command
from align.common.errors import UserError
from align.models.block_config import BlockConfig
from align.models.target_features import TargetFeatures, target_features
from align.target.model import Target

STEPS = ("training_step", "validation_step")
"""A module's methods that use its weights."""


_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
"""Of transformers' plans, what is done with a layer's weights."""
_WHOLE = ("replicated_with_grad_allreduce", "replicate", "replicated")
"""What they call weights that stay whole: a frozen target has no gradients to sum."""


class Sharded(ModelParallelStrategy):
    """FSDP2 over all processes. A checkpoint is one file, put together on the main process: any number of processes goes on from it.

    Args:
        offload: weights and the optimizer's state stay in the host's memory.
    """

    def __init__(self, processes: int, backend: str | None, offload: bool, timeout: timedelta) -> None:
        super().__init__(
            data_parallel_size=processes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
            timeout=timeout,
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


# ---- the target ----


def _move(target: Target, device: torch.device) -> None:
    """What is whole and there goes to the device, into memory of its own: the file or the piece of memory that it shared with
    others is free then."""
    places: dict[Any, Tensor] = {}  # tied weights stay tied
    for tensor in (*target.model.parameters(), *target.model.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            its = tensor.data
            place = (its.data_ptr(), its.shape, its.stride())
            if place not in places:
                places[place] = its.to(device, copy=True)
            tensor.data = places[place]
    target.device = device
    target.find_ends()


class AbsentTarget:
    """The frozen target without its layers, which are given up: what they compute is on disk. Embedding and head stay."""

    def __init__(self, target: Target, device: torch.device, folder: Path) -> None:
        self.folder = folder
        target.hash  # noqa: B018 (of the whole weights, while they are)
        target.fused = None
        for layer in target.layers:
            layer.to("meta")
        _move(target, device)

    def features(self, target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
        """Raises UserError: a row that is not on disk, or no longer whole."""
        raise UserError(
            f"target.parallel=absent: a row that is trained on is missing or damaged in {self.folder} ({command('align.features')} with the "
            "words of this run, without target.parallel, stores it)"
        )

    anywhere = staticmethod(bool)


class SharedTarget:
    """The frozen target in parts, in every process of a run.

    Args:
        how: `fsdp` = each layer is put together for its own call, over the process's own rows; `tp` = a layer's products are shared
            out, and all processes go through the rows of one after the other.

    Raises:
        UserError: a target that can't be taken apart like this.
    """

    def __init__(self, target: Target, how: str, device: torch.device) -> None:
        self.target, self.how = target, how
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self._check()
        target.hash  # noqa: B018 (of the whole weights, while they are)
        target.fused = None
        mesh = init_device_mesh(device.type, (self.world,))
        if how == "fsdp":
            for layer in target.layers:
                fully_shard(layer, mesh=mesh)
            # the layers' root, so that the next one is fetched while one computes; what the drafter reads stays whole
            rest = {p for p in target.body.parameters() if not isinstance(p, DTensor)}
            fully_shard(target.body, mesh=mesh, ignored_params=rest)
        else:
            for layer in target.layers:
                parallelize_module(layer, mesh, self._plan(layer))
            shapes = [
                None if s is None else s._replace(heads=s.heads // self.world) for s in target.anatomy.shapes
            ]
            target.anatomy = replace(target.anatomy, shapes=shapes)
        _move(target, device)

    def _check(self) -> None:
        target, key = self.target, f"target.parallel={self.how}"
        if target.anatomy.recurrent:
            raise UserError(f"{key}: target {target.spec!r} has recurrent states (target.parallel=replicate)")
        if target.apart:  # one process has more texts in a row than another, and they run its layers together
            raise UserError(
                f"{key}: target {target.spec!r} counts places in a row, so texts run one by one (target.parallel=replicate)"
            )
        if any(not p.is_floating_point() for p in target.model.parameters()):
            raise UserError(f"{key}: target {target.spec!r} is quantised (target.parallel=replicate)")
        if self.how == "tp":
            heads = {s.heads for s in target.anatomy.shapes if s is not None} | {target.num_heads}
            if odd := next((n for n in sorted(heads) if n % self.world), None):
                raise UserError(
                    f"{key}: {odd} heads of target {target.spec!r} can't be shared by {self.world} processes (target.parallel=fsdp)"
                )

    def _plan(self, layer: nn.Module) -> dict[str, ParallelStyle]:
        """What is done with each of a layer's modules, by its name in it."""
        key, plan = f"target.parallel=tp: target {self.target.spec!r}", self.target.config.base_model_tp_plan
        found: dict[str, ParallelStyle] = {}
        for name, style in (plan or {}).items():
            own = name.partition(".*.")[2]
            if not own or style in _WHOLE or own not in dict(layer.named_modules()):
                continue
            if style not in _STYLES:
                raise UserError(f"{key} has {own} {style}, which is not done here (target.parallel=fsdp)")
            found[own] = _STYLES[style]()
        if not found:
            raise UserError(f"{key}: transformers has no plan for its architecture (target.parallel=fsdp)")
        return found

    def features(self, target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
        """`target_features`, asked by all processes at once, each of its own rows; of `tp` batches of one shape."""
        if self.how == "fsdp":
            return target_features(target, batch, config)
        mine: TargetFeatures | None = None
        for rank in range(self.world):
            tensors = [t.clone() if rank == self.rank else torch.empty_like(t) for t in vars(batch).values()]
            for tensor in tensors:
                dist.broadcast(tensor, rank)
            found = target_features(target, Batch(*tensors), config)
            keys, values = ([self._all_heads(t) for t in part] for part in (found.keys, found.values))
            if rank == self.rank:
                mine = TargetFeatures(found.hidden_BLD, keys, values, found.taps_BLFD)
        assert mine is not None
        return mine

    def _all_heads(self, part: Tensor) -> Tensor:
        """Of every process's heads (B, H/n, L, d) all, (B, H, L, d)."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.world)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=1)

    def anywhere(self, mine: bool) -> bool:
        """Whether it is so in any process."""
        flag = torch.tensor(int(mine), device=self.target.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
