"""AdamW, or Muon with it, as a recipe asks for them: parts with their own learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from align.common.errors import UserError
from align.config.drafter import PARTS
from align.config.trainer import TrainerConfig
from align.target.dtypes import target_dtype

_OPTIONS = {
    "markov": "markov_rank",
    "convolution": "convolution",
    "self_conditioning": "self_conditioning",
    "confidence": "confidence_head",
}
"""The recipe's option that gives the drafter a part."""


MATRICES = "matrices"
"""The group that Muon moves: the layers' linear weights."""
_MOMENTUM = 0.95
"""Of Muon's running mean, after Nesterov."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Of X, X Xᵀ X and (X Xᵀ)² X: the steepest at zero (Jordan et al., 2024)."""
_ROUNDS = 5


def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether Muon moves it. Embeddings and heads are rows, one for each token, and convolutions begin at zero: they are AdamW's."""
    inside = ("layers." in name or "blocks." in name) and name.endswith(".weight")
    return inside and parameter.dim() == 2 and "_conv." not in name


def peak_rate(t: TrainerConfig, part: str) -> float:
    """Of a group of weights, by its part's name."""
    return t.muon_learning_rate if part == MATRICES else t.learning_rates.get(part, t.learning_rate)


def make_optimizer(trained: Mapping[str, torch.nn.Parameter], t: TrainerConfig) -> torch.optim.Optimizer:
    """The optimizer of the weights that are trained, by name. Raises UserError as `parameter_groups`."""
    options: dict[str, Any] = {"lr": t.learning_rate, "betas": (t.betas[0], t.betas[1])}
    if t.optimizer == "muon":
        products = target_dtype("auto", next(iter(trained.values())).device)
        return MuonAdamW(parameter_groups(trained, t), products, **options, weight_decay=t.weight_decay)
    groups: list[Any] = parameter_groups(trained, t) if t.learning_rates else list(trained.values())
    return torch.optim.AdamW(groups, **options, weight_decay=t.weight_decay)


class MuonAdamW(torch.optim.AdamW):
    """Muon for the group of `MATRICES`, AdamW for the others, under one state.

    A matrix moves by its gradients' running mean made orthogonal (Jordan et al., 2024), scaled to the size that AdamW's steps have
    (Liu et al., arXiv 2502.16982, eq. 4). In bf16 these are the steps of `torch.optim.Muon`, to the bit.

    Args:
        products: the type in which matrices are made orthogonal.
    """

    def __init__(self, groups: list[dict[str, Any]], products: torch.dtype, **options: Any) -> None:
        super().__init__(groups, **options)
        self._products = products

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW's own looks for its numbers in every weight's state
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["part"] != MATRICES:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
                    parameter.grad = None  # done: AdamW passes it over
        super().step()
        return loss

    def _move(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - _MOMENTUM)
        update = orthogonal(gradient.lerp(mean, _MOMENTUM), self._products)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonal(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """About U Vᵀ of the singular value decomposition U S Vᵀ of a matrix (rows, columns), by products in `dtype`, which is the
    result's: five Newton-Schulz steps (Jordan et al., 2024), after which singular values lie between 0.7 and 1.2 or so.

    torch's own take bf16 everywhere: 25 times as long as fp32 on a processor without such products.
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


def orthogonal_flops(shape: tuple[int, int]) -> int:
    """Of `orthogonal`."""
    short, long = sorted(shape)
    return _ROUNDS * (4 * short * short * long + 2 * short**3)


def parameter_groups(trained: Mapping[str, torch.nn.Parameter], t: TrainerConfig) -> list[dict[str, Any]]:
    """The optimizer's groups: what takes `learning_rate`, then each part of `learning_rates`.

    Raises:
        UserError: the drafter lacks a part, or it is not trained.
    """
    groups: dict[str, list[torch.nn.Parameter]] = {"": [], **{part: [] for part in t.learning_rates}}
    if t.optimizer == "muon":
        groups[MATRICES] = []
    for name, parameter in trained.items():
        matrix = MATRICES in groups and is_matrix(name, parameter)
        own = (part for part in t.learning_rates if PARTS[part] in name)
        groups[MATRICES if matrix else next(own, "")].append(parameter)
    for part, members in groups.items():
        if part and not members:
            if part == MATRICES:
                raise UserError("trainer.optimizer=muon: no layer's matrix is trained (drafter.train)")
            raise UserError(
                f"trainer.learning_rates.{part}: no such part of the drafter is trained "
                f"(drafter.{_OPTIONS[part]})"
            )
    return [{"params": members, "part": part} for part, members in groups.items() if members]
