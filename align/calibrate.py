"""The LightningModule of calibration: drafter + objective + optimizer. The target stays outside of it, frozen."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from align.acceptance import Estimate, acceptance_per_position, accepted_greedy, expected_accepted_token
from align.datamodule import Step
from align.drafters.block import BlockDrafter, target_features
from align.ema import EMA
from align.errors import UserError
from align.losses import DraftRows, Objective, RowStatistics, row_statistics, target_places
from align.recipe import Recipe


class NonFiniteLoss(RuntimeError):
    """Training met a loss that is not a number; the batch was saved. One line, for exit code 1."""


class Calibrate(lightning.LightningModule):
    """Trains `drafter` towards its target on packed target-written rows.

    Args:
        drafter: q; knows its target p.
        recipe: objective, trainer and output are read.
    """

    def __init__(self, drafter: BlockDrafter, recipe: Recipe) -> None:
        super().__init__()
        o = recipe.objective
        self.drafter, self.recipe = drafter, recipe
        self.objective = Objective(o.terms, o.weighting, o.decay, o.d_pace_alpha)
        self.ema = EMA(drafter, recipe.trainer.ema)
        self.identity = {"drafter": drafter.config.to_dict()}
        self.train_numbers: dict[str, float] = {}  # of the last step, for the progress line
        self.validation_numbers: dict[str, float] = {}
        self.positions = self.tokens_seen = 0
        self._started: float | None = None
        self._resumed_rng: dict[str, Any] | None = None
        self._parts: list[tuple[Tensor, ...]] = []

    def model_step(self, step: Step) -> RowStatistics:
        """Statistics (B, A, K) of one micro-batch: target, then drafter, then head."""
        drafter, target, o = self.drafter, self.drafter.target, self.recipe.objective
        batch, anchors = step.batch, step.anchors
        features = target_features(target, batch, drafter.config)
        length = batch.tokens_BL.shape[1]
        following = batch.tokens_BL.roll(-1, dims=1).flatten()
        places = target_places(features.hidden_BLD.flatten(0, 1), following, target.head, o.temperature)
        hidden = drafter(batch, features, anchors)
        factors = drafter.markov_factors(batch, anchors, hidden)
        offset = torch.arange(hidden.shape[0], device=hidden.device)[:, None, None] * length
        rows = DraftRows(
            hidden.flatten(0, 2),
            (anchors.places_BAK(length) + offset).flatten(),
            None if factors is None else factors[0].flatten(0, 2),
            None if factors is None else factors[1],
        )
        return row_statistics(
            rows,
            places,
            drafter.head_weight_VdD,
            drafter.draft_vocab,
            tuple(anchors.valid_BAK.shape),
            self.objective.wanted,
            o.temperature,
            o.chunk_rows,
        )

    def training_step(self, step: Step, index: int) -> Tensor:
        statistics, valid = self.model_step(step), step.anchors.valid_BAK
        anchors = valid[..., 0].sum()
        # every process divides by the mean count, so that their averaged gradients are those of the whole batch
        world = self.trainer.world_size
        shared = self._over_processes(anchors.float()) if world > 1 else anchors
        loss = self.objective.per_position(statistics, valid).sum() / shared.clamp_min(1)
        value = float(self._over_processes(loss.detach()) if world > 1 else loss)
        if not math.isfinite(value):
            self._save_nonfinite(step)
        with torch.no_grad():
            accepted = self._accepted(statistics, valid)[0]
        self.train_numbers = {"loss": value, "tau": 1.0 + float(accepted.mean()) if accepted.numel() else 1.0}
        self.positions += int(valid.sum()) * world
        self.tokens_seen += int((step.batch.document_BL >= 0).sum()) * world
        return loss

    def _over_processes(self, value: Tensor) -> Tensor:
        """Mean of a scalar over all training processes."""
        gathered = self.all_gather(value)
        assert isinstance(gathered, Tensor)
        return gathered.mean()

    @staticmethod
    def _accepted(statistics: RowStatistics, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Expected accepted drafts under token and greedy verification from every anchor with a whole block ahead."""
        whole = valid.all(-1)
        token = expected_accepted_token(
            statistics.log_q_label, statistics.p_label, statistics.acceptance, valid
        )
        return token[whole], accepted_greedy(statistics.match, statistics.greedy_label, valid)[whole]

    def _save_nonfinite(self, step: Step) -> None:
        path = Path(self.recipe.output) / f"nonfinite-step-{self.global_step}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.contiguous() for k, v in {**vars(step.batch), **vars(step.anchors)}.items()}
        save_file(tensors, str(path))
        raise NonFiniteLoss(f"the loss at step {self.global_step} is not finite; its batch is in {path}")

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self._resumed_rng is not None:
            _set_rng(self._resumed_rng)
            self._resumed_rng = None
        if self._started is None:
            self._started = time.monotonic()
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.learning_rate(self.global_step)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then cosine to the least rate at max_steps, or at max_minutes when that comes first."""
        t = self.recipe.trainer
        if step < t.warmup_steps:
            return t.learning_rate * (step + 1) / t.warmup_steps
        done = (step - t.warmup_steps) / max(1, t.max_steps - t.warmup_steps)
        if t.max_minutes is not None and self._started is not None:
            done = max(done, min(1.0, (time.monotonic() - self._started) / (60 * t.max_minutes)))
        low = t.min_learning_rate_ratio
        return t.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))

    def out_of_time(self) -> bool:
        limit = self.recipe.trainer.max_minutes
        return (
            limit is not None and self._started is not None and time.monotonic() - self._started > 60 * limit
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % self.recipe.trainer.accumulate == 0:
            self.ema.update(self.drafter)

    def validation_step(self, step: Step, index: int) -> None:
        with self.ema.applied(self.drafter):
            statistics = self.model_step(step)
        valid = step.anchors.valid_BAK
        self._parts.append(
            (*self._accepted(statistics, valid), statistics.acceptance.flatten(0, 1), valid.flatten(0, 1))
        )

    def on_validation_epoch_end(self) -> None:
        token, greedy, acceptance, valid = (torch.cat(part) for part in zip(*self._parts, strict=True))
        self._parts.clear()
        sampling, argmax = Estimate.of(token), Estimate.of(greedy)
        numbers = {
            "tau_sampling": 1 + sampling.mean,
            "tau_sampling_se": sampling.error,
            "tau_greedy": 1 + argmax.mean,
            "tau_greedy_se": argmax.error,
            "anchors": float(sampling.count),
        }
        per_position = acceptance_per_position(acceptance, valid).tolist()
        numbers |= {f"acceptance_{k + 1}": value for k, value in enumerate(per_position)}
        self.validation_numbers = numbers

    def configure_optimizers(self) -> torch.optim.Optimizer:
        t = self.recipe.trainer
        weights = [p for p in self.drafter.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            weights, lr=t.learning_rate, betas=(t.betas[0], t.betas[1]), weight_decay=t.weight_decay
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        counters = {"positions": self.positions, "tokens_seen": self.tokens_seen}
        checkpoint["calibrate"] = {
            "identity": self.identity,
            "ema": self.ema.state_dict(),
            "rng": _rng(),
            **counters,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mine = checkpoint["calibrate"]
        for name, value in mine["identity"]["drafter"].items():
            if self.identity["drafter"].get(name) != value:
                raise UserError(
                    f"trainer.resume: the checkpoint's drafter has {name}={value!r}, this recipe's "
                    f"{self.identity['drafter'].get(name)!r}; use trainer.resume=never or another output"
                )
        self.ema.load_state_dict(mine["ema"])
        self.positions, self.tokens_seen = mine["positions"], mine["tokens_seen"]
        self._resumed_rng = mine["rng"]


def _rng() -> dict[str, Any]:
    """All random states, as plain values that a weights-only load accepts."""
    numpy_state = np.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [numpy_state[0], torch.from_numpy(numpy_state[1].astype(np.int64)), *numpy_state[2:]],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, words_t, *rest = state["numpy"]
    np.random.set_state((name, words_t.cpu().numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
