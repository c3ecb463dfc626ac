"""What is counted: how far training has come, and a validation's sums, which processes add up, with the numbers made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, sqrt
from typing import Any

import torch
from torch import Tensor

KINDS = ("greedy", "sampling")
WINDOW = ("loss", "accepted", "anchors", "batches")


@dataclass
class TrainingProgress:
    """How far a run has come over all its parts and processes, the same in each of these.

    positions: drafted positions that the loss counted. tokens_seen: text tokens. seconds: time trained. window: sums since the
    last progress line. stop_wanted: this process got a signal. stopping: one of the processes did, and all know it.
    """

    positions: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    window: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WINDOW, 0.0))
    stop_wanted: bool = False
    stopping: bool = False

    def add(
        self,
        *,
        loss: float,
        accepted: float,
        anchors: float,
        positions: float,
        tokens: float,
        seconds: float,
        stop: bool,
    ) -> None:
        """One micro-batch; `accepted`: expected drafts accepted, summed over `anchors` anchors."""
        for name, value in zip(WINDOW, (loss, accepted, anchors, 1.0), strict=True):
            self.window[name] += value
        self.positions += int(positions)
        self.tokens_seen += int(tokens)
        self.seconds += seconds
        self.stopping = stop

    def means(self) -> dict[str, float]:
        """Loss and, where it was estimated, expected τ since the last call."""
        w = self.window
        found = {"loss": w["loss"] / max(w["batches"], 1)}
        if w["anchors"]:
            found["tau"] = 1 + w["accepted"] / w["anchors"]
        self.window = dict.fromkeys(w, 0.0)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "positions": self.positions,
            "tokens_seen": self.tokens_seen,
            "seconds": self.seconds,
            "window": dict(self.window),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.positions, self.tokens_seen = state["positions"], state["tokens_seen"]
        self.seconds, self.window = state["seconds"], dict(state["window"])


class ValidationSums:
    """One validation: loss, accepted drafts by kind of text, acceptance by position. K positions."""

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

    def accepted(self, kind: str, chances: Tensor) -> None:
        """The chance that drafts from anchors of text of one kind are accepted as far as each position, (n, K)."""
        v = chances.sum(-1).double()
        sums = torch.stack([torch.ones_like(v).sum(), v.sum(), (v * v).sum()])
        self._accepted[kind] += torch.cat([sums, chances.double().sum(0)]).cpu()

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
        the text before it, whether drafts got there or not; `kept_…_k` the share of drafts that were accepted up to there,
        and their sum τ − 1.

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
