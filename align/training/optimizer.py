"""AdamW, or Muon with AdamW, with separate learning rates for parts of a drafter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from align.config.drafter import PARTS
from align.config.trainer import TrainerConfig
from specalign.common.errors import UserError
from specalign.lm.dtypes import target_dtype

_OPTIONS = {
    "markov": "markov_rank",
    "convolution": "convolution",
    "confidence": "confidence_head",
}
"""The option that adds each part."""


MATRICES = "matrices"
"""The group that Muon updates: the layers' linear weights."""
_MOMENTUM = 0.95
"""Nesterov momentum of Muon."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X Xᵀ X and (X Xᵀ)² X (Jordan et al., 2024)."""
_ROUNDS = 5


def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether Muon updates it. Embeddings, heads, and convolutions, which start at zero, use
    AdamW."""
    inside = ("layers." in name or "blocks." in name) and name.endswith(".weight")
    return inside and parameter.dim() == 2 and "_conv." not in name


def peak_rate(t: TrainerConfig, part: str) -> float:
    """The peak learning rate of a parameter group."""
    return t.muon_learning_rate if part == MATRICES else t.learning_rates.get(part, t.learning_rate)


def make_optimizer(
    trained: Mapping[str, torch.nn.Parameter], t: TrainerConfig
) -> torch.optim.Optimizer:
    """The optimizer of trained weights, by name. Raises UserError as `parameter_groups`."""
    options: dict[str, Any] = {"lr": t.learning_rate, "betas": (t.betas[0], t.betas[1])}
    if t.optimizer == "muon":
        dtype = target_dtype("auto", next(iter(trained.values())).device)
        return MuonAdamW(
            parameter_groups(trained, t), dtype, **options, weight_decay=t.weight_decay
        )
    groups: list[Any] = parameter_groups(trained, t) if t.learning_rates else list(trained.values())
    return torch.optim.AdamW(groups, **options, weight_decay=t.weight_decay)


class MuonAdamW(torch.optim.AdamW):
    """Muon for the group `MATRICES`, AdamW for the others, with one state.

    Updates are orthogonalised momentum (Jordan et al., 2024), scaled to the size of AdamW's steps
    (Liu et al., arXiv 2502.16982, eq. 4). In bf16 the steps equal those of `torch.optim.Muon` bit
    for bit.

    Args:
        dtype: the compute type of the orthogonalisation.
    """

    def __init__(self, groups: list[dict[str, Any]], dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, **options)
        self._dtype = dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW's expects its own state for every weight
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["part"] != MATRICES:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_matrix(parameter, group)
                    parameter.grad = None  # AdamW skips it
        super().step()
        return loss

    def _update_matrix(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
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
    tall = matrix.shape[0] > matrix.shape[1]
    moved = matrix.to(dtype)
    moved = moved.T if tall else moved
    moved = moved / moved.norm().clamp(min=1e-7)
    linear, cubic, quintic = _NEWTON_SCHULZ
    for _ in range(_ROUNDS):
        gram = moved @ moved.T
        moved = torch.addmm(
            moved, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), moved, beta=linear
        )
    return moved.T if tall else moved


def parameter_groups(
    trained: Mapping[str, torch.nn.Parameter], t: TrainerConfig
) -> list[dict[str, Any]]:
    """The weights with `learning_rate`, then each part of `learning_rates`.

    Raises:
        UserError: a part is missing in the drafter or not trained.
    """
    groups: dict[str, list[torch.nn.Parameter]] = {
        "": [],
        **{part: [] for part in t.learning_rates},
    }
    if t.optimizer == "muon":
        groups[MATRICES] = []
    for name, parameter in trained.items():
        matrix = MATRICES in groups and is_matrix(name, parameter)
        parts = (part for part in t.learning_rates if PARTS[part] in name)
        groups[MATRICES if matrix else next(parts, "")].append(parameter)
    for part, members in groups.items():
        if part and not members:
            if part == MATRICES:
                raise UserError(
                    "trainer.optimizer=muon: no layer's matrix is trained (drafter.train)"
                )
            raise UserError(
                f"trainer.learning_rates.{part}: the drafter has no such trained part "
                f"(drafter.{_OPTIONS[part]})"
            )
    return [{"params": members, "part": part} for part, members in groups.items() if members]
