"""The frozen target of a run over several processes: sharded by FSDP2, or without its layers."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from specalign.common.batch import Batch
from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import TargetFeatures, target_features


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
