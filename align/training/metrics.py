"""Sums over held-out anchors that processes can add up, and the numbers made of them."""

from __future__ import annotations

from math import exp, sqrt

import torch
from torch import Tensor

KINDS = ("greedy", "sampling")


class Tallies:
    """Collects one validation: loss, accepted drafts by kind of text, acceptance by position. K positions."""

    def __init__(self, block_size: int) -> None:
        self._loss = torch.zeros(2, dtype=torch.float64)  # sum, anchors
        # count, sum, sum of squares, and the sum at every position
        self._accepted = {kind: torch.zeros(3 + block_size, dtype=torch.float64) for kind in KINDS}
        # sum of β and count; of greedy text apart: it stands in where there is no other
        self._positions = torch.zeros(2, 2, block_size, dtype=torch.float64)
        # nats x and tokens n of blocks: Σx, Σn, Σx², Σxn, Σn², and how many
        self._bound = torch.zeros(6, dtype=torch.float64)

    def loss(self, total: Tensor, anchors: Tensor) -> None:
        """The loss summed over `anchors` anchors."""
        self._loss += torch.stack([total.double(), anchors.double()]).cpu()

    def accepted(self, kind: str, kept: Tensor) -> None:
        """The chance that drafts from anchors of text of one kind are kept as far as each position, (n, K)."""
        v = kept.sum(-1).double()
        sums = torch.stack([torch.ones_like(v).sum(), v.sum(), (v * v).sum()])
        self._accepted[kind] += torch.cat([sums, kept.double().sum(0)]).cpu()

    def positions(self, kind: str, acceptance: Tensor, valid: Tensor) -> None:
        """β = Σ min(p, q), (…, K), where valid."""
        b, ok = acceptance.double().flatten(0, -2), valid.double().flatten(0, -2)
        self._positions[int(kind == "greedy")] += torch.stack([(b * ok).sum(0), ok.sum(0)]).cpu()

    def bound(self, nats: Tensor, tokens: Tensor) -> None:
        """A bound on −log q of each block's tokens given the text before it, and how many these are."""
        x, n = nats.double().flatten(), tokens.double().flatten()
        x, n = x[n > 0], n[n > 0]
        sums = [x.sum(), n.sum(), (x * x).sum(), (x * n).sum(), (n * n).sum(), torch.ones_like(n).sum()]
        self._bound += torch.stack(sums).cpu()

    def vector(self) -> Tensor:
        """All sums, (2 + 6 + 2K + 4K + 6,) fp64."""
        return torch.cat([self._loss, *self._accepted.values(), self._positions.flatten(), self._bound])

    def numbers(self, vector: Tensor) -> dict[str, float]:
        """What is reported, from summed-up vectors; a τ without any anchor is left out. `acceptance_k` is the mean β given
        the text before it, whether drafts got there or not; `kept_…_k` the share of drafts that were kept so far, and
        their sum τ − 1.

        Standard errors take anchors as independent; anchors of one text are not quite.
        """
        loss, rest, bound = vector[:2], vector[2:-6], vector[-6:].tolist()
        found = {"loss": float(loss[0] / loss[1].clamp_min(1))}
        places = self._positions.shape[-1]
        own, rest = rest[: len(KINDS) * (3 + places)].view(len(KINDS), -1), rest[len(KINDS) * (3 + places) :]
        kept: dict[str, float] = {}
        for kind, sums in zip(KINDS, own.tolist(), strict=True):
            count, total, squares, *each = sums
            if count == 0:
                continue
            mean = total / count
            spread = max(squares - count * mean * mean, 0.0) / max(count - 1, 1)
            found |= {
                f"tau_{kind}": 1 + mean,
                f"tau_{kind}_se": sqrt(spread / count),
                f"anchors_{kind}": count,
            }
            kept |= {f"kept_{kind}_{k + 1}": value / count for k, value in enumerate(each)}
        sampled, greedy = rest.view(2, 2, -1)
        sums, counts = sampled if bool(sampled[1].any()) else greedy
        found |= _bound_numbers(*bound)
        found |= {
            f"acceptance_{k + 1}": float(s / n)
            for k, (s, n) in enumerate(zip(sums, counts, strict=True))
            if n > 0
        }
        return found | kept


def _bound_numbers(x: float, n: float, xx: float, xn: float, nn: float, blocks: float) -> dict[str, float]:
    """Nats per token, with the standard error of the ratio of sums, and the perplexity that they bound."""
    if n == 0:
        return {}
    ratio = x / n
    spread = max(xx - 2 * ratio * xn + ratio * ratio * nn, 0.0)
    return {
        "bound": ratio,
        "bound_se": sqrt(spread * blocks / max(blocks - 1, 1)) / n,
        "perplexity": exp(min(ratio, 700.0)),
    }
