"""What training every kind of drafter has in common: objective, optimizer, counters, validation, checkpoints.

The target stays outside of the module, frozen.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from safetensors.torch import save_file
from torch import Tensor

from align.common.batch import Step
from align.common.files import write_atomically
from align.common.rng import random_state, seed_global, set_random_state
from align.config.hardware import process_number
from align.config.recipe import Recipe
from align.losses.acceptance import expected_accepted_token, kept_greedy, kept_token
from align.losses.divergences import RowStatistics
from align.losses.objective import Objective
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.causal import CausalDrafter
from align.models.standalone import DiffusionDrafter
from align.models.target_features import target_features
from align.outputs.cache import TargetOutputCache, TargetOutputs, compute_target_outputs
from align.training.ema import EMA
from align.training.metrics import TrainingProgress, ValidationSums
from align.training.optimizer import make_optimizer, parameter_groups, peak_rate
from align.training.parallel.sharded import AbsentTarget, Sharded, SharedTarget
from align.training.schedule import Schedule, first_schedule

Drafter = BlockDrafter | DiffusionDrafter | CausalDrafter


class NonFiniteLoss(RuntimeError):
    """Training met a loss that is not a number; the batch was saved. One line, for exit code 1."""


class Interrupted(RuntimeError):
    """A signal asked training to stop; a checkpoint was saved."""


class DrafterModule(lightning.LightningModule, ABC):
    """Trains `drafter` towards its target on packed target-written rows.

    Args:
        drafter: q; knows its target p.
        recipe: stage, objective, trainer and output are read.
    """

    drafter: Drafter

    def __init__(self, drafter: Drafter, recipe: Recipe) -> None:
        super().__init__()
        o = recipe.objective
        self.drafter, self.recipe = drafter, recipe
        self.objective = Objective(o.terms, o.weighting, o.decay, o.d_pace_alpha)
        self.ema = EMA(drafter, recipe.trainer.ema)
        self.target_cache: TargetOutputCache | None = None
        if recipe.trainer.keep_features_gb or recipe.trainer.features_gb:
            self.target_cache = TargetOutputCache(
                drafter.target,
                self.conditioning,
                recipe.trainer,
                recipe.features_folder,
                process_number(),
                recipe.processes,
            )
        self.schedule: Schedule = first_schedule(recipe)
        """Of the learning rate and the rows; a resumed run's continues its checkpoint's."""
        self.progress = TrainingProgress()
        self.validation_numbers: dict[str, float] = {}
        self.first_numbers: dict[str, float] = {}
        """Those before the first step, where `trainer.validate_first` asks for them."""
        self.final_weights: dict[str, Tensor] = {}
        self._counted_at = 0.0  # on the monotonic clock
        self._sums = ValidationSums(drafter.config.block_size)
        self._resumed_rng: dict[str, Any] | None = None
        self._sharded = False
        self.shared_target: SharedTarget | AbsentTarget | None = None
        if recipe.trainer.learning_rates or recipe.trainer.optimizer == "muon":
            parameter_groups(
                self.trained(), recipe.trainer
            )  # what can't be had is said before training begins

    def configure_model(self) -> None:
        """Called once the processes know each other."""
        strategy, how = self.trainer.strategy, self.recipe.target.parallel
        if how != "replicate" and self.shared_target is None:
            target, device = self.drafter.target, strategy.root_device
            self.shared_target = (
                AbsentTarget(target, device, self.recipe.features_folder)
                if how == "absent"
                else SharedTarget(target, how, device)
            )
            if self.target_cache is not None:
                self.target_cache.run = self.shared_target.features
                self.target_cache.missing = self.shared_target.anywhere
        if isinstance(strategy, Sharded) and not self._sharded:
            strategy.shard(self)
            self.ema = EMA(self.drafter, self.recipe.trainer.ema)
            self._sharded = True

    # ---- the one step ----

    @abstractmethod
    def model_step(self, step: Step, temperature: float) -> RowStatistics:
        """Statistics (B, A, K) of one micro-batch, of drafts from nothing: what is validated; p at `temperature`."""

    def draft_statistics(self, step: Step) -> tuple[RowStatistics, Tensor, Tensor]:
        """What a training step learns from: statistics (B, A, K), which of them count, and the anchors (B, A) that tell τ."""
        s = self.model_step(step, self.recipe.objective.temperature)
        return s, step.anchors.valid_BAK, self.complete(step)

    @property
    def conditioning(self) -> BlockConfig | None:
        """What the drafter is shown of the target besides p; None = nothing."""
        return None

    def target_outputs(self, step: Step, temperature: float) -> TargetOutputs:
        """The target over a micro-batch, p at `temperature`."""
        if self.target_cache is not None and step.keys:
            return self.target_cache.outputs(step, temperature)
        run = target_features if self.shared_target is None else self.shared_target.features
        return compute_target_outputs(self.drafter.target, step, self.conditioning, temperature, run)

    @staticmethod
    def used_rows(step: Step, outputs: TargetOutputs) -> Tensor:
        """Of every drafted position, which of the outputs' places has the p that it imitates, (B, A, K)."""
        length = step.batch.tokens_BL.shape[1]
        offset = torch.arange(len(step.batch.tokens_BL), device=outputs.used_P.device)[:, None, None] * length
        place_BAK = step.anchors.places_BAK(length) + offset
        return torch.searchsorted(outputs.used_P, place_BAK).clamp_max(len(outputs.used_P) - 1)

    def complete(self, step: Step) -> Tensor:
        """Anchors that tell τ, (B, A): the target wrote the anchor itself (decoding never drafts right after a template),
        and the data do not cut its block: K valid drafts, or fewer that end in end-of-sequence."""
        valid, tokens = step.anchors.valid_BAK, step.batch.tokens_BL
        written = step.batch.answer_BL.gather(1, step.anchors.index_BA)
        if not all(step.written):
            written = written & torch.tensor(step.written, device=written.device)[:, None]
        count = valid.sum(-1)
        last = tokens.gather(1, (step.anchors.index_BA + count).clamp_max(tokens.shape[1] - 1))
        ends = torch.isin(last, torch.tensor(self.drafter.target.eos_ids, device=tokens.device))
        return written & (valid.all(-1) | ((count > 0) & ends))

    # ---- training ----

    def on_train_start(self) -> None:
        self._counted_at = time.monotonic()
        if self._resumed_rng is not None:
            set_random_state(self._resumed_rng)
            self._resumed_rng = None

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        seed_global(self.recipe.seed, 8, *batch.places)
        t = self.recipe.trainer
        rate = self.schedule.rate_at(self.global_step, self.progress.seconds)
        for group in self.trainer.optimizers[0].param_groups:
            peak = peak_rate(t, group.get("part", ""))
            group["lr"] = rate if peak == t.learning_rate else rate / t.learning_rate * peak

    def training_step(self, step: Step, index: int) -> Tensor:
        s, valid, whole = self.draft_statistics(step)
        loss = self.objective.per_position(s, valid).sum() * step.scale
        accepted = expected_accepted_token(s.log_q_label, s.p_label, s.acceptance, valid)
        self._count(step, loss.detach(), valid.sum(), (accepted * whole).sum(), whole.sum())
        return loss

    @torch.no_grad()
    def _count(self, step: Step, loss: Tensor, positions: Tensor, accepted: Tensor, anchors: Tensor) -> None:
        """Add this micro-batch, over all processes, to `progress`: one transfer and one reduction. `accepted`: expected
        drafts accepted, summed over `anchors` anchors."""
        now = time.monotonic()
        spent, self._counted_at = now - self._counted_at, now
        sums = [loss, accepted, anchors, positions, (step.batch.document_BL >= 0).sum()]
        host = [float(self.progress.stop_wanted), spent]
        vector = torch.cat(
            [
                torch.stack([x.double() for x in sums]),
                torch.tensor(host, dtype=torch.float64, device=loss.device),
            ]
        )
        total, world = self._summed(vector).tolist(), self.trainer.world_size
        if not math.isfinite(total[0] / world):
            self._stop_non_finite(step, bool(loss.isfinite()))
        self.progress.add(
            loss=total[0] / world, accepted=total[1], anchors=total[2], positions=total[3], tokens=total[4],
            stop=total[5] > 0, seconds=total[6] / world,
        )  # fmt: skip

    def _summed(self, vector: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(vector)
        return vector

    def _stop_non_finite(self, step: Step, mine_is_fine: bool) -> None:
        number = self.global_step + 1
        rank = f"-rank-{self.global_rank}" if self.trainer.world_size > 1 else ""
        path = Path(self.recipe.output) / f"nonfinite-step-{number}{rank}.safetensors"
        if not mine_is_fine:
            tensors = {**vars(step.batch), **vars(step.anchors)}
            plain = {k: v.contiguous().cpu() for k, v in tensors.items()}
            write_atomically(path, lambda part: save_file(plain, str(part)))
        where = path if not rank else path.parent / f"nonfinite-step-{number}-rank-*.safetensors"
        raise NonFiniteLoss(f"the loss at step {number} is not finite; its batch is in {where}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.trained(), self.recipe.trainer)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The weights that are trained, by name."""
        return {name: p for name, p in self.drafter.named_parameters() if p.requires_grad}

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.ema.decay and (batch_idx + 1) % self.recipe.trainer.accumulate == 0:
            with self.whole_weights():
                self.ema.update(self.drafter)

    @contextmanager
    def whole_weights(self, write: bool = False) -> Iterator[None]:
        """The drafter's weights as they are, where the strategy keeps parts of them in different processes (ZeRO-3)."""
        gather = getattr(self.trainer.strategy, "whole_parameters", None)
        if gather is None:
            yield
        else:
            with gather(list(self.drafter.parameters()), write):
                yield

    def copy_final_weights(self) -> None:
        """Copy the weights that are to be saved, averaged where EMA is on, out of the strategy's hands."""
        with self.whole_weights():
            self.final_weights = self.ema.weights(self.drafter)

    def on_train_end(self) -> None:
        self.copy_final_weights()

    # ---- validation ----

    def on_validation_epoch_start(self) -> None:
        self._sums = ValidationSums(self.drafter.config.block_size)
        with self.whole_weights(write=True):
            self.ema.swap_in(self.drafter)

    def validation_step(self, step: Step, index: int) -> None:
        if step.scale == 0:  # a repeated row, there to keep the processes in step
            self.model_step(step, 1.0)
            return
        s, valid = self.model_step(step, 1.0), step.anchors.valid_BAK
        self._sums.loss(self.objective.per_position(s, valid).sum(), valid[..., 0].sum())
        self._add_acceptance(step, s)

    def _add_acceptance(self, step: Step, s: RowStatistics) -> None:
        """Expected τ and acceptance by position."""
        valid, whole = step.anchors.valid_BAK, self.complete(step)
        if step.kind == "greedy":
            self._sums.accepted("greedy", kept_greedy(s.match, s.greedy_label, valid)[whole])
        if step.kind == "sampling":
            kept = kept_token(s.log_q_label, s.p_label, s.acceptance, valid)
            self._sums.accepted("sampling", kept[whole])
        self._sums.positions(step.kind, s.acceptance, valid)

    def on_validation_epoch_end(self) -> None:
        # before the checkpoint of this step, which is saved after validation
        with self.whole_weights(write=True):
            self.ema.swap_out(self.drafter)
        device = next(self.drafter.parameters()).device
        self.validation_numbers = self._sums.numbers(self._summed(self._sums.vector().to(device)).cpu())

    @torch.no_grad()
    def validate_now(self) -> None:
        """A validation outside of the Trainer's turn: before the first step."""
        rows: Any = self.trainer
        self.eval()
        self.on_validation_epoch_start()
        for i, step in enumerate(rows.datamodule.val_dataloader()):
            with self.trainer.precision_plugin.val_step_context():  # Lightning's own loop enters it by itself
                self.validation_step(step.to(self.device), i)
        self.on_validation_epoch_end()
        self.train()

    # ---- checkpoints ----

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["calibrate"] = {  # the name that checkpoints have had from the beginning
            "identity": {"drafter": self.drafter.config.to_dict()},
            "ema": self.ema.state_dict(),
            "rng": random_state(),
            "validation": dict(self.validation_numbers),
            "first": dict(self.first_numbers),
            **self.progress.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mine = checkpoint["calibrate"]
        self.ema.load_state_dict(mine["ema"])
        self.progress.load_state_dict(mine)
        self.validation_numbers = dict(mine["validation"])
        self.first_numbers = dict(mine.get("first", {}))  # checkpoints of before 2026-11-28 have none
        self._resumed_rng = mine["rng"]
