"""The frozen target shared by the processes of a run: FSDP2, tensor parallelism, or without its
layers.

Tensor parallelism follows transformers' plan for the architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from specalign.common.batch import Batch
from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import TargetFeatures, target_features

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_REPLICATED = ("replicated_with_grad_allreduce", "replicate", "replicated")
"""Styles of transformers' plans for weights that are not split; a frozen target has no gradients to
sum."""


def _move(target: Target, device: torch.device) -> None:
    """Move what is not sharded to the device. Copies, so that mapped files and shared buffers are
    freed."""
    places: dict[Any, Tensor] = {}  # tied weights stay tied
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
            f"({command('align.features')} with this "
            "run's arguments, without target.parallel, stores it)"
        )

    anywhere = staticmethod(bool)


class SharedTarget:
    """The frozen target, sharded over the processes of a run.

    Args:
        how: `fsdp` = each layer is gathered for its forward pass over the process's own rows; `tp`
            = tensor parallelism, all processes compute one process's rows after another.

    Raises:
        UserError: a target that can't be sharded like this.
    """

    def __init__(self, target: Target, how: str, device: torch.device) -> None:
        self.target, self.how = target, how
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self._check()
        target.hash  # noqa: B018 (cached before the weights are gone)
        target.unfuse()
        mesh = init_device_mesh(device.type, (self.world,))
        if how == "fsdp":
            for layer in target.layers:
                fully_shard(layer, mesh=mesh)
            # their root prefetches the next layer; what the drafter reads is not sharded
            rest = {p for p in target.body.parameters() if not isinstance(p, DTensor)}
            fully_shard(target.body, mesh=mesh, ignored_params=rest)
        else:
            for layer in target.layers:
                parallelize_module(layer, mesh, self._plan(layer))
            target.split_heads(self.world)
        _move(target, device)

    def _check(self) -> None:
        target, key = self.target, f"target.parallel={self.how}"
        if target.anatomy.recurrent:
            raise UserError(
                f"{key}: target {target.spec!r} has recurrent states (target.parallel=replicate)"
            )
        if target.anatomy.apart:  # processes would run the layers a different number of times
            raise UserError(
                f"{key}: target {target.spec!r} has absolute positions, so texts run one by one "
                "(target.parallel=replicate)"
            )
        if any(not p.is_floating_point() for p in target.model.parameters()):
            raise UserError(
                f"{key}: target {target.spec!r} is quantised (target.parallel=replicate)"
            )
        if self.how == "tp":
            heads = {s.heads for s in target.anatomy.shapes if s is not None} | {target.num_heads}
            if odd := next((n for n in sorted(heads) if n % self.world), None):
                raise UserError(
                    f"{key}: {odd} heads of target {target.spec!r} can't be shared by {self.world} "
                    "processes (target.parallel=fsdp)"
                )

    def _plan(self, layer: nn.Module) -> dict[str, ParallelStyle]:
        """The parallel style of each of a layer's modules, by name."""
        key, plan = (
            f"target.parallel=tp: target {self.target.spec!r}",
            self.target.config.base_model_tp_plan,
        )
        modules = {inner: module for inner, module in layer.named_modules() if inner}
        styles: dict[str, ParallelStyle] = {}
        for name, style in (plan or {}).items():
            inner = name.partition(".*.")[2]
            if style in _REPLICATED or inner not in modules:
                continue
            if style not in _STYLES:
                raise UserError(
                    f"{key} has {inner} {style}, which is not supported (target.parallel=fsdp)"
                )
            styles[inner] = _STYLES[style]()
        if not styles:
            raise UserError(
                f"{key}: transformers has no plan for its architecture (target.parallel=fsdp)"
            )
        return styles

    def features(self, target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
        """`target_features` of this process's rows, called by all processes at once; with `tp` all
        batches have one shape."""
        if self.how == "fsdp":
            return target_features(target, batch, config)
        mine: TargetFeatures | None = None
        for rank in range(self.world):
            tensors = [
                t.clone() if rank == self.rank else torch.empty_like(t)
                for t in vars(batch).values()
            ]
            for tensor in tensors:
                dist.broadcast(tensor, rank)
            features = target_features(target, Batch(*tensors), config)
            keys = [self._gather_heads(t) for t in features.keys]
            values = [self._gather_heads(t) for t in features.values]
            if rank == self.rank:
                mine = TargetFeatures(features.hidden_BLD, keys, values, features.taps_BLFD)
        assert mine is not None
        return mine

    def _gather_heads(self, part: Tensor) -> Tensor:
        """(B, H/n, L, d) of each process → (B, H, L, d)."""
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.world)
        ]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=1)

    def anywhere(self, mine: bool) -> bool:
        """Whether it is true in any process."""
        flag = torch.tensor(int(mine), device=self.target.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
