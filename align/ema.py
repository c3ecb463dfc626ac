"""An exponential moving average of the trainable weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """shadow ← d·shadow + (1−d)·weight after every step, with d = min(decay, (1+n)/(10+n)) at step n (SEDD's warm-up).

    A decay of 0 switches it off: the weights themselves are used.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {n: p.detach().clone() for n, p in module.named_parameters()} if decay else {}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        if not self.decay:
            return
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, parameter in module.named_parameters():
            self.shadow[name].lerp_(parameter.detach().to(self.shadow[name].dtype), 1 - d)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """The averaged weights in place of the module's own, for the length of a `with` block."""
        if not self.decay:
            yield
            return
        own = {n: p.detach().clone() for n, p in module.named_parameters()}
        self._copy(module, self.shadow)
        try:
            yield
        finally:
            self._copy(module, own)

    @torch.no_grad()
    def _copy(self, module: nn.Module, values: dict[str, Tensor]) -> None:
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])

    def state_dict(self) -> dict[str, object]:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.updates = int(state["updates"])  # type: ignore[call-overload]
        shadow = state["shadow"]
        assert isinstance(shadow, dict)
        for name in self.shadow:
            self.shadow[name].copy_(shadow[name])
