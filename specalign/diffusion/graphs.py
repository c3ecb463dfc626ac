"""The forward process of one token: a continuous-time Markov chain whose rate matrix is Q = 1πᵀ −
I.

π is its stationary distribution, and each token is replaced by a draw from π at rate 1: the mask
(absorbing) or any token (uniform). Q² = −Q, hence e^(σQ) = e^(−σ)·I + (1−e^(−σ))·1πᵀ, and its
inverse with −σ. Matrices act on row vectors: Q(x, y) is the rate from x to y. SEDD: arXiv
2310.16834. V counts the mask. Computed in fp32 (fp64 stays).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specalign.common.errors import UserError
from specalign.diffusion.parameterization import full_precision, log_expm1, logsumexp_and_label


@dataclass(frozen=True)
class Graph(ABC):
    """Transitions among `size` states. Tokens (…,); σ broadcasts to them; rows over states (…, V).

    Raises:
        UserError: fewer than two states, or a mask that is not among them.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise UserError(f"diffusion graph: size={self.size} must be at least 2")

    @abstractmethod
    def limit(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Draws from π, int64 of that shape, on the generator's device."""

    @abstractmethod
    def score_entropy(self, log_score_V: Tensor, sigma: Tensor, x_t: Tensor, x_0: Tensor) -> Tensor:
        """Denoising score entropy per position, (…,), nats, without the rate dσ (SEDD, arXiv
        2310.16834).

        Σ_{y≠x_t} Q(y, x_t)·(s_y − r_y·log s_y + r_y·(log r_y − 1)), r_y = p(y|x_0)/p(x_t|x_0): at
        least 0, and 0 where s = r. The log-score of x_t itself is not read.
        """

    def corrupt(
        self, tokens: Tensor, sigma: Tensor, generator: torch.Generator, may: Tensor | None = None
    ) -> Tensor:
        """A draw of x_t given x_0 = tokens, positions independent; with `may` (bool), only where it
        is True."""
        place = generator.device
        chance = -torch.expm1(-full_precision(sigma))
        u = torch.rand(tokens.shape, generator=generator, dtype=chance.dtype, device=place).to(
            tokens.device
        )
        moved = u < chance
        if may is not None:
            moved = moved & may
        return torch.where(moved, self.limit(tokens.shape, generator).to(tokens.device), tokens)


@dataclass(frozen=True)
class Absorbing(Graph):
    """Tokens turn into `mask_id`, one of the `size` states, and stay there."""

    mask_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_id < self.size:
            raise UserError(
                f"absorbing graph: mask_id={self.mask_id} is not within 0..{self.size - 1}"
            )

    def limit(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.full(tuple(shape), self.mask_id, device=generator.device)

    def score_entropy(self, log_score_V: Tensor, sigma: Tensor, x_t: Tensor, x_0: Tensor) -> Tensor:
        def entropy(log_score_RV: Tensor, sigma_R: Tensor, x_0_R: Tensor) -> Tensor:
            log_odds = log_expm1(sigma_R)
            return torch.exp(-log_odds) * excess(log_score_RV, x_0_R, self.mask_id, log_odds)

        return on_rows(entropy, x_t == self.mask_id, log_score_V, sigma, x_0)


@dataclass(frozen=True)
class Uniform(Graph):
    """Tokens turn into any of the `size` states, including themselves."""

    def limit(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randint(self.size, tuple(shape), generator=generator, device=generator.device)

    def score_entropy(self, log_score_V: Tensor, sigma: Tensor, x_t: Tensor, x_0: Tensor) -> Tensor:
        log_score_V = full_precision(log_score_V).scatter(-1, x_t[..., None], 0.0)
        odds = torch.exp(-log_expm1(sigma))
        log_ratio = -torch.log1p(self.size * odds)  # of p(y|x_0) to p(x_0|x_0), y ≠ x_0
        ratio = log_ratio.exp()
        mean = log_score_V.sum(-1) / self.size
        positive = (log_score_V.exp().sum(-1) - 1) / self.size
        of_x_0 = log_score_V.gather(-1, x_0[..., None])[..., 0]
        # stayed: every ratio is `ratio`. moved: that of x_0 is 1/ratio, all others are 1
        stayed = -ratio * mean + (self.size - 1) / self.size * ratio * (log_ratio - 1)
        moved = -odds * of_x_0 - mean + ((-log_ratio - 1) / ratio - (self.size - 2)) / self.size
        return positive + torch.where(x_t == x_0, stayed, moved)


def excess(x_V: Tensor, x_0: Tensor, mask_id: int, shift: Tensor | float) -> Tensor:
    """(e^σ − 1)·DSE of masked positions whose log-score is x + shift − log(e^σ − 1), (…,).

    Z − 1 − (x + shift) at x_0, Z = Σ_{y≠mask} e^(x_y + shift); σ itself has dropped out. It is
    −log softmax(x)[x_0] + (Z − 1 − log Z): the cross-entropy, and 0 or more for a wrong sum.
    """
    log_sum, label = logsumexp_and_label(x_V, x_0, mask_id)
    return torch.expm1(log_sum + shift) - (label + shift)


def on_rows(
    statistic: Callable[..., Tensor], where: Tensor, x_V: Tensor, *values: Tensor
) -> Tensor:
    """`statistic(x_RV, *values_R)` of the R positions that `where` marks, in its shape; 0
    elsewhere.

    Rows of `x_V` are gathered before they are converted to fp32, and not copied if all are marked.
    """
    index = where.reshape(-1).nonzero()[:, 0]
    rows = x_V.expand(*where.shape, x_V.shape[-1]).reshape(-1, x_V.shape[-1])
    if len(index) < len(rows):
        rows = rows[index]
    value = statistic(
        full_precision(rows), *(v.expand(where.shape).reshape(-1)[index] for v in values)
    )
    return value.new_zeros(where.numel()).index_copy(0, index, value).view(where.shape)
