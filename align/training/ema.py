"""An exponential moving average of the trainable weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from align.training.parallel.sharded import put, whole


class EMA:
    """shadow ← d·shadow + (1−d)·weight after every step, d = min(decay, (1+n)/(10+n)) after n updates (SEDD's warm-up).

    A decay of 0 switches it off: nothing is kept and the weights themselves count. The shadow is fp32; of weights in parts
    (FSDP2) every process averages its own.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {n: p.detach().float().clone() for n, p in module.named_parameters()} if decay else {}
        self._own: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take in the module's present weights."""
        if not self.decay:
            return
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, parameter in module.named_parameters():
            self.shadow[name].lerp_(parameter.detach().float(), 1 - d)

    @torch.no_grad()
    def swap_in(self, module: nn.Module) -> None:
        """Put the averaged weights in place of the module's own, which are kept for `swap_out`."""
        if self.decay and not self._own:
            self._own = {n: p.detach().clone() for n, p in module.named_parameters()}
            for name, parameter in module.named_parameters():
                parameter.copy_(self.shadow[name])

    @torch.no_grad()
    def swap_out(self, module: nn.Module) -> None:
        """The module's own weights again, to the bit."""
        if self._own:
            for name, parameter in module.named_parameters():
                parameter.copy_(self._own[name])
            self._own = {}

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The weights that count, averaged or not: fp32 copies on the CPU."""
        now = self.shadow if self.decay else dict(module.named_parameters())
        return {name: whole(p.detach()).to("cpu", torch.float32, copy=True) for name, p in now.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": {name: whole(t) for name, t in self.shadow.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A shadow that the state lacks (it was trained without one) starts from the present weights."""
        self.updates = int(state["updates"])
        for name in self.shadow.keys() & state["shadow"].keys():
            put(self.shadow[name], state["shadow"][name])
