"""AdamW, or Muon for the layers' matrices with AdamW for the rest; the learning rate of every step;
averaged weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from align.config.trainer import TrainerConfig
from align.training.strategies import copy_into, gather
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.lm.dtypes import target_dtype

_MOMENTUM = 0.95  # Nesterov's, of Muon
_STACK_NUMBERS = 1 << 26  # of matrices that Muon updates together: bounds its memory
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
    device = matrices[0].device
    numbers = 0 if device.type == "cpu" else _STACK_NUMBERS
    return MuonAdamW(groups, target_dtype("auto", device), numbers, **options)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates it. Embeddings, heads, and convolutions, which start at zero, use
    AdamW."""
    inside = ("layers." in name or "blocks." in name) and name.endswith(".weight")
    return inside and parameter.dim() == 2 and "_conv." not in name


class MuonAdamW(torch.optim.AdamW):
    """Muon for the groups with `muon`, AdamW for the others, with one state. Updates are
    orthogonalised momentum (Jordan et al., 2024), scaled to the size of AdamW's steps (Liu et al.,
    arXiv 2502.16982, eq. 4); in bf16 those of one matrix equal `torch.optim.Muon`'s bit for bit.
    Matrices of one shape, or its transpose, are orthogonalised together, up to `stack_numbers`."""

    def __init__(
        self,
        groups: list[dict[str, object]],
        dtype: torch.dtype,
        stack_numbers: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self._dtype = dtype
        self._stack_numbers = stack_numbers

    def __setstate__(self, state: dict[str, object]) -> None:
        # AdamW's expects its own state for every weight
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None] if group["muon"] else []
            for stack in group_matrices(matrices, self._stack_numbers):
                self._update_matrices(stack, group)
            for parameter in matrices:
                parameter.grad = None  # AdamW skips it
        super().step()
        return loss

    def _update_matrices(self, matrices: list[Tensor], group: JsonObject) -> None:
        gradients = [p.grad for p in matrices if p.grad is not None]
        for parameter in matrices:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        means = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(means, gradients, 1 - _MOMENTUM)
        updates = orthogonalise(torch._foreach_lerp(gradients, means, _MOMENTUM), self._dtype)
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * 0.2 * math.sqrt(max(matrices[0].shape))
        torch._foreach_add_(matrices, updates, alpha=-rate)


def group_matrices(matrices: Sequence[Tensor], numbers: int) -> list[list[Tensor]]:
    """Matrices of one shape, or its transpose, in stacks of at most `numbers` numbers, or alone."""
    stacks: list[list[Tensor]] = []
    last: dict[tuple[int, ...], list[Tensor]] = {}
    for matrix in matrices:
        shape = tuple(sorted(matrix.shape))
        if shape not in last or (len(last[shape]) + 1) * matrix.numel() > numbers:
            last[shape] = []
            stacks.append(last[shape])
        last[shape].append(matrix)
    return stacks


def orthogonalise(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Approximately U Vᵀ of each matrix U S Vᵀ of one shape, or its transpose: five Newton-Schulz
    steps (Jordan et al., 2024) in `dtype`; torch's version always uses bf16, on most CPUs 25 times
    as slow as fp32."""
    is_tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
    wide = [
        m.to(dtype).T if tall else m.to(dtype) for m, tall in zip(matrices, is_tall, strict=True)
    ]
    is_stack = len(wide) > 1
    moved = torch.stack(wide) if is_stack else wide[0]
    product: Callable[..., Tensor] = torch.baddbmm if is_stack else torch.addmm
    moved = moved / torch.linalg.vector_norm(moved, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    linear, cubic, quintic = _NEWTON_SCHULZ
    for _ in range(5):
        gram = moved @ moved.mT
        polynomial = product(gram, gram, gram, beta=cubic, alpha=quintic)
        moved = product(moved, polynomial, moved, beta=linear)
    found = moved.unbind() if is_stack else [moved]
    return [m.T if tall else m for m, tall in zip(found, is_tall, strict=True)]


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
        names, parameters = zip(*module.named_parameters(), strict=True)
        weights = [parameter.detach().float() for parameter in parameters]
        torch._foreach_lerp_([self.shadow[name] for name in names], weights, 1 - d)

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
