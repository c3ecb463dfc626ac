"""AdamW, or Muon for the layers' matrices with AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from align.config.trainer import TrainerConfig
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.lm.dtypes import target_dtype

_MOMENTUM = 0.95
"""Nesterov momentum of Muon."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X Xᵀ X and (X Xᵀ)² X (Jordan et al., 2024)."""
_ROUNDS = 5


def make_optimizer(
    trained: Mapping[str, torch.nn.Parameter], t: TrainerConfig
) -> torch.optim.Optimizer:
    """The optimizer of trained weights, by name. Raises UserError if Muon has nothing to update."""
    betas = (t.betas[0], t.betas[1])
    if t.optimizer == "adamw":
        weights = list(trained.values())
        return torch.optim.AdamW(
            weights, lr=t.learning_rate, betas=betas, weight_decay=t.weight_decay
        )
    matrices = [p for name, p in trained.items() if is_matrix(name, p)]
    others = [p for name, p in trained.items() if not is_matrix(name, p)]
    if not matrices:
        raise UserError("trainer.optimizer=muon: no layer's matrix is trained (drafter.train)")
    groups = [{"params": others, "muon": False}, {"params": matrices, "muon": True}]
    dtype = target_dtype("auto", matrices[0].device)
    return MuonAdamW(
        [group for group in groups if group["params"]],
        dtype,
        lr=t.learning_rate,
        betas=betas,
        weight_decay=t.weight_decay,
    )


def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether Muon updates it. Embeddings, heads, and convolutions, which start at zero, use
    AdamW."""
    inside = ("layers." in name or "blocks." in name) and name.endswith(".weight")
    return inside and parameter.dim() == 2 and "_conv." not in name


def set_rate(optimizer: torch.optim.Optimizer, t: TrainerConfig, rate: float) -> None:
    """Set the learning rate, that of Muon's matrices in proportion to its own peak."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        if group.get("muon"):
            group["lr"] = rate / t.learning_rate * t.muon_learning_rate


class MuonAdamW(torch.optim.AdamW):
    """Muon for the groups with `muon`, AdamW for the others, with one state.

    Updates are orthogonalised momentum (Jordan et al., 2024), scaled to the size of AdamW's steps
    (Liu et al., arXiv 2502.16982, eq. 4). In bf16 the steps equal those of `torch.optim.Muon` bit
    for bit. `dtype`: the compute type of the orthogonalisation."""

    def __init__(self, groups: list[dict[str, object]], dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, **options)
        self._dtype = dtype

    def __setstate__(self, state: dict[str, object]) -> None:
        # AdamW's expects its own state for every weight
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._update_matrix(parameter, group)
                    parameter.grad = None  # AdamW skips it
        super().step()
        return loss

    def _update_matrix(self, parameter: torch.nn.Parameter, group: JsonObject) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - _MOMENTUM)
        update = orthogonalise(gradient.lerp(mean, _MOMENTUM), self._dtype)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalise(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Approximately U Vᵀ of a matrix U S Vᵀ, computed in `dtype`: five Newton-Schulz steps (Jordan
    et al., 2024), after which singular values are between about 0.7 and 1.2.

    torch's version always uses bf16, which takes 25 times as long as fp32 on a CPU without bf16
    arithmetic.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    moved = matrix.to(dtype)
    moved = moved.T if is_tall else moved
    moved = moved / moved.norm().clamp(min=1e-7)
    linear, cubic, quintic = _NEWTON_SCHULZ
    for _ in range(_ROUNDS):
        gram = moved @ moved.T
        polynomial = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        moved = torch.addmm(moved, polynomial, moved, beta=linear)
    return moved.T if is_tall else moved
