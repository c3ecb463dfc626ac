"""Counters of training progress and sums of a validation, both summed over processes."""

from dataclasses import dataclass, field
from math import exp, isfinite, sqrt

import torch
from torch import Tensor

from specalign.common.schema import JsonObject

KINDS = ("greedy", "sampling")
WINDOW = ("loss", "accepted", "anchors", "batches")
_SAVED = ("positions", "tokens_seen", "seconds", "window")


@dataclass
class TrainingProgress:
    """Progress of a run over all its parts and processes; the same in every process. positions:
    drafted positions in the loss. tokens_seen: text tokens. seconds: time trained. window: sums
    since the last progress line. stop_wanted: this process received a signal. stopping: one of the
    processes did, and all know."""

    positions: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    window: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WINDOW, 0.0))
    stop_wanted: bool = False
    stopping: bool = False

    def add(self, total: list[float], world: int) -> bool:
        """Count one micro-batch, summed over processes. False = its loss is not finite: nothing is
        counted."""
        loss, accepted, anchors, positions, tokens, stop, seconds = total
        if not isfinite(loss):
            return False
        for name, value in zip(WINDOW, (loss / world, accepted, anchors, 1.0), strict=True):
            self.window[name] += value
        self.positions += int(positions)
        self.tokens_seen += int(tokens)
        self.seconds += seconds / world
        self.stopping = stop > 0
        return True

    def take_means(self) -> dict[str, float]:
        """Loss and, if estimated, expected τ since the last call."""
        w, self.window = self.window, dict.fromkeys(WINDOW, 0.0)
        means = {"loss": w["loss"] / max(w["batches"], 1)}
        if w["anchors"]:
            means["expected_tau"] = 1 + w["accepted"] / w["anchors"]
        return means

    def state_dict(self) -> JsonObject:
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: JsonObject) -> None:
        for name in _SAVED:
            setattr(self, name, state[name])


class HostCopy:
    """A tensor's copy on the host, which does not wait until `tolist`."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # pinned, from a GPU
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def tolist(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()


class ValidationSums:
    """One validation of drafts of K tokens: loss, accepted drafts by kind of text, acceptance by
    position, bound."""

    def __init__(self, block_size: int) -> None:
        self._loss = torch.zeros(2, dtype=torch.float64)  # sum, anchors
        # by kind of text: count, sum, sum of squares, and the sum at every position
        self._accepted = torch.zeros(len(KINDS), 3 + block_size, dtype=torch.float64)
        # sum of β and count; index 1 is greedy text, which is used if there is no other
        self._positions = torch.zeros(2, 2, block_size, dtype=torch.float64)
        # nats x and tokens n of blocks: Σx, Σn, Σx², Σxn, Σn², blocks
        self._bound = torch.zeros(6, dtype=torch.float64)

    def add_loss(self, total: Tensor, anchors: Tensor) -> None:
        """The loss summed over `anchors` anchors."""
        self._loss += torch.stack([total.double(), anchors.double()]).cpu()

    def add_accepted(self, kind: str, chances: Tensor) -> None:
        """The probability that drafts after n anchors of one kind of text are accepted up to each
        position, (n, K)."""
        v = chances.sum(-1).double()
        sums = torch.stack([torch.ones_like(v).sum(), v.sum(), (v * v).sum()])
        self._accepted[KINDS.index(kind)] += torch.cat([sums, chances.double().sum(0)]).cpu()

    def add_positions(self, kind: str, acceptance: Tensor, valid: Tensor) -> None:
        """β = Σ min(p, q), (…, K), where valid."""
        b, ok = acceptance.double().flatten(0, -2), valid.double().flatten(0, -2)
        self._positions[int(kind == "greedy")] += torch.stack([(b * ok).sum(0), ok.sum(0)]).cpu()

    def add_bound(self, nats: Tensor, tokens: Tensor) -> None:
        """A bound on −log q of each block given the text before it, and the block's number of
        tokens."""
        x, n = nats.double().flatten(), tokens.double().flatten()
        x, n = x[n > 0], n[n > 0]
        terms = torch.stack([x, n, x * x, x * n, n * n, torch.ones_like(n)])
        self._bound += terms.sum(1).cpu()

    def vector(self) -> Tensor:
        """All sums, (2 + 6 + 2K + 4K + 6,) fp64."""
        parts = (self._loss, self._accepted, self._positions, self._bound)
        return torch.cat([part.flatten() for part in parts])

    def numbers(self, vector: Tensor) -> dict[str, float]:
        """Metrics from vectors summed over processes; without anchors there is no τ. `acceptance_k`
        is the mean β given the text before it; `kept_…_k` the share of drafts accepted up to
        position k, which sum to τ − 1. Standard errors treat anchors as independent."""
        sizes = [t.numel() for t in (self._loss, self._accepted, self._positions, self._bound)]
        loss, accepted, positions, bound = vector.split(sizes)
        numbers = {"loss": float(loss[0] / loss[1].clamp_min(1))}
        kept: dict[str, float] = {}
        for kind, sums in zip(KINDS, accepted.view(len(KINDS), -1).tolist(), strict=True):
            count, total, squares, *by_position = sums
            if count == 0:
                continue
            mean = total / count
            variance = max(squares - count * mean * mean, 0.0) / max(count - 1, 1)
            numbers[f"tau_{kind}"] = 1 + mean
            numbers[f"tau_{kind}_se"] = sqrt(variance / count)
            numbers[f"anchors_{kind}"] = count
            kept |= {f"kept_{kind}_{k + 1}": value / count for k, value in enumerate(by_position)}
        x, n, xx, xn, nn, blocks = bound.tolist()
        if n:  # nats per token with the standard error of a ratio of sums
            ratio = x / n
            spread = max(xx - 2 * ratio * xn + ratio * ratio * nn, 0.0)
            numbers["bound"] = ratio
            numbers["bound_se"] = sqrt(spread * blocks / max(blocks - 1, 1)) / n
            numbers["perplexity"] = exp(min(ratio, 700.0))
        sampled, greedy = positions.view(2, 2, -1).tolist()
        sums_K, counts_K = sampled if any(sampled[1]) else greedy
        for k, (total, count) in enumerate(zip(sums_K, counts_K, strict=True), 1):
            if count:
                numbers[f"acceptance_{k}"] = total / count
        return numbers | kept
