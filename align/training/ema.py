"""An exponential moving average of the trainable weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from align.training.parallel.sharded import copy_into, gather
from specalign.common.schema import JsonObject


class EMA:
    """shadow ← d·shadow + (1−d)·weight after every step, d = min(decay, (1+n)/(10+n)) after n
    updates (SEDD's warm-up).

    A decay of 0 switches it off. The shadow is fp32; with FSDP2 every process averages its own
    shards.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = (
            {n: p.detach().float().clone() for n, p in module.named_parameters()} if decay else {}
        )
        self._replaced: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Average in the module's present weights."""
        if not self.decay:
            return
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, parameter in module.named_parameters():
            self.shadow[name].lerp_(parameter.detach().float(), 1 - d)

    @torch.no_grad()
    def swap_in(self, module: nn.Module) -> None:
        """Replace the module's weights by the averaged ones until `swap_out`."""
        if self.decay and not self._replaced:
            self._replaced = {n: p.detach().clone() for n, p in module.named_parameters()}
            for name, parameter in module.named_parameters():
                parameter.copy_(self.shadow[name])

    @torch.no_grad()
    def swap_out(self, module: nn.Module) -> None:
        """Restore the module's own weights."""
        if self._replaced:
            for name, parameter in module.named_parameters():
                parameter.copy_(self._replaced[name])
            self._replaced = {}

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The weights to save, averaged or not: fp32 copies on the CPU."""
        weights = self.shadow if self.decay else dict(module.named_parameters())
        return {
            name: gather(p.detach()).to("cpu", torch.float32, copy=True)
            for name, p in weights.items()
        }

    def state_dict(self) -> dict[str, object]:
        return {
            "updates": self.updates,
            "shadow": {name: gather(t) for name, t in self.shadow.items()},
        }

    def load_state_dict(self, state: JsonObject) -> None:
        """A shadow that the state lacks (trained without EMA) starts from the present weights."""
        self.updates = int(state["updates"])
        for name in self.shadow.keys() & state["shadow"].keys():
            copy_into(self.shadow[name], state["shadow"][name])
