"""AdamW, or Muon for the layers' matrices with AdamW for the rest; the learning rate of every step;
averaged weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from align.config.trainer import TrainerConfig
from align.training.strategies import copy_into, gather
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.lm.dtypes import target_dtype

_MOMENTUM = 0.95  # Nesterov's, of Muon
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of X, X Xᵀ X and (X Xᵀ)² X (Jordan et al., 2024)


def learning_rate(t: TrainerConfig, step: int, seconds: float) -> float:
    """Linear warm-up, then cosine decay to the minimum at max_steps, or at max_minutes if that
    comes first: a function of steps and seconds, so that no scheduler has to be saved."""
    if step < t.warmup_steps:
        return t.learning_rate * (step + 1) / t.warmup_steps
    done = (step - t.warmup_steps) / max(1, t.max_steps - t.warmup_steps)
    if t.max_minutes is not None:
        done = max(done, seconds / (60 * t.max_minutes))
    low = t.min_learning_rate_ratio
    return t.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def set_rate(optimizer: torch.optim.Optimizer, t: TrainerConfig, rate: float) -> None:
    """Set the learning rate, that of Muon's matrices in proportion to its own peak."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        if group.get("muon"):
            group["lr"] = rate / t.learning_rate * t.muon_learning_rate


def make_optimizer(trained: Mapping[str, nn.Parameter], t: TrainerConfig) -> torch.optim.Optimizer:
    """The optimizer of trained weights, by name. Raises UserError if Muon has nothing to update."""
    options = {"lr": t.learning_rate, "betas": tuple(t.betas), "weight_decay": t.weight_decay}
    if t.optimizer == "adamw":
        return torch.optim.AdamW(list(trained.values()), **options)  # type: ignore[arg-type]
    matrices = [p for name, p in trained.items() if is_matrix(name, p)]
    others = [p for name, p in trained.items() if not is_matrix(name, p)]
    if not matrices:
        raise UserError("drafter.train leaves no matrices for Muon; use trainer.optimizer=adamw")
    groups = [{"params": others, "muon": False}] if others else []
    groups.append({"params": matrices, "muon": True})
    return MuonAdamW(groups, target_dtype("auto", matrices[0].device), **options)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates it. Embeddings, heads, and convolutions, which start at zero, use
    AdamW."""
    inside = ("layers." in name or "blocks." in name) and name.endswith(".weight")
    return inside and parameter.dim() == 2 and "_conv." not in name


class MuonAdamW(torch.optim.AdamW):
    """Muon for the groups with `muon`, AdamW for the others, with one state. Updates are
    orthogonalised momentum (Jordan et al., 2024), scaled to the size of AdamW's steps (Liu et al.,
    arXiv 2502.16982, eq. 4); in bf16 they equal `torch.optim.Muon`'s bit for bit."""

    def __init__(self, groups: list[dict[str, object]], dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, **options)
        self._dtype = dtype

    def __setstate__(self, state: dict[str, object]) -> None:
        # AdamW's expects its own state for every weight
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of both optimizers."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._update_matrix(parameter, group)
                    parameter.grad = None  # AdamW skips it
        super().step()
        return loss

    def _update_matrix(self, parameter: nn.Parameter, group: JsonObject) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - _MOMENTUM)
        update = orthogonalise(gradient.lerp(mean, _MOMENTUM), self._dtype)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximately U Vᵀ of a matrix U S Vᵀ: five Newton-Schulz steps (Jordan et al., 2024) in
    `dtype`; torch's version always uses bf16, on most CPUs 25 times as slow as fp32."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    moved = matrix.to(dtype)
    moved = moved.T if is_tall else moved
    moved = moved / moved.norm().clamp(min=1e-7)
    linear, cubic, quintic = _NEWTON_SCHULZ
    for _ in range(5):
        gram = moved @ moved.T
        polynomial = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        moved = torch.addmm(moved, polynomial, moved, beta=linear)
    return moved.T if is_tall else moved


class EMA:
    """Averaged weights in fp32: shadow ← d·shadow + (1−d)·weight after every step, d = min(decay,
    (1+n)/(10+n)) after n updates (SEDD's warm-up). With FSDP2 every process averages its shards."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow: dict[str, Tensor] = {}
        self._replaced: list[Tensor] = []
        if decay:
            self.shadow = {n: p.detach().float().clone() for n, p in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, parameter in module.named_parameters():
            self.shadow[name].lerp_(parameter.detach().float(), 1 - d)

    @torch.no_grad()
    def swap_in(self, module: nn.Module) -> None:
        """Replace the module's weights by the averaged ones until `swap_out`."""
        for name, parameter in module.named_parameters() if self.decay else ():
            self._replaced.append(parameter.detach().clone())
            parameter.copy_(self.shadow[name])

    @torch.no_grad()
    def swap_out(self, module: nn.Module) -> None:
        for parameter, own in zip(module.parameters(), self._replaced, strict=False):
            parameter.copy_(own)
        self._replaced = []

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The weights to save, averaged or not: fp32 copies on the CPU."""
        weights = self.shadow if self.decay else dict(module.named_parameters())
        copies = ((name, gather(p.detach())) for name, p in weights.items())
        return {name: p.to("cpu", torch.float32, copy=True) for name, p in copies}

    def state_dict(self) -> JsonObject:
        return {"updates": self.updates, "shadow": {n: gather(t) for n, t in self.shadow.items()}}

    def load_state_dict(self, state: JsonObject) -> None:
        """A shadow that the state lacks (trained without EMA) starts from the present weights."""
        self.updates = int(state["updates"])
        for name in self.shadow.keys() & state["shadow"].keys():
            copy_into(self.shadow[name], state["shadow"][name])
