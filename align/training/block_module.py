"""The LightningModule of calibration: drafter + objective + optimizer. The target stays outside of it, frozen."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import torch
from safetensors.torch import save_file
from torch import Tensor

from align.common.rng import keyed_generator, random_state, set_random_state
from align.config.recipe import Recipe, TrainerConfig
from align.diffusion.noise import clean_prefixes
from align.losses.acceptance import expected_accepted_token, kept_greedy, kept_token
from align.losses.objective import DraftRows, Objective, RowStatistics, after_prefix, row_statistics
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.causal import CausalDrafter
from align.models.standalone import DiffusionDrafter
from align.training.datamodule import Step
from align.training.ema import EMA
from align.training.metrics import Tallies
from align.training.target_cache import TargetOutputCache, View, compute_target_outputs


class NonFiniteLoss(RuntimeError):
    """Training met a loss that is not a number; the batch was saved. One line, for exit code 1."""


def learning_rate(t: TrainerConfig, step: int, seconds: float) -> float:
    """Linear warm-up, then cosine to the least rate at max_steps, or at max_minutes where that comes first.

    A function of the steps taken and the seconds trained alone: a checkpoint that holds both needs no scheduler.
    """
    if step < t.warmup_steps:
        return t.learning_rate * (step + 1) / t.warmup_steps
    done = (step - t.warmup_steps) / max(1, t.max_steps - t.warmup_steps)
    if t.max_minutes is not None:
        done = max(done, seconds / (60 * t.max_minutes))
    low = t.min_learning_rate_ratio
    return t.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


class BlockDrafterModule(lightning.LightningModule):
    """Trains `drafter` towards its target on packed target-written rows.

    Args:
        drafter: q; knows its target p.
        recipe: objective, trainer and output are read.
    """

    def __init__(self, drafter: BlockDrafter | DiffusionDrafter | CausalDrafter, recipe: Recipe) -> None:
        super().__init__()
        o = recipe.objective
        self.drafter, self.recipe = drafter, recipe
        self.objective = Objective(o.terms, o.weighting, o.decay, o.d_pace_alpha)
        self.ema = EMA(drafter, recipe.trainer.ema)
        memory = recipe.trainer.keep_features_gb
        self.kept = TargetOutputCache(drafter.target, self.view_config, memory) if memory else None
        self.identity = {"drafter": drafter.config.to_dict()}
        self.window = {
            "loss": 0.0,
            "accepted": 0.0,
            "anchors": 0.0,
            "batches": 0.0,
        }  # since the last progress line
        self.positions = self.tokens_seen = 0
        self.rate = 0.0  # the learning rate of this step
        self.seconds = 0.0  # trained, over all parts of the run and the same in all processes
        self.stop_wanted = False  # by this process: it got a signal
        self.stopping = False  # agreed among the processes
        self.validation_numbers: dict[str, float] = {}
        self.final_weights: dict[str, Tensor] = {}
        self._clock = 0.0
        self._tallies = Tallies(drafter.config.block_size)
        self._resumed_rng: dict[str, Any] | None = None

    # ---- the one step ----

    def prefixes(self, step: Step) -> Tensor | None:
        """How many tokens after its anchor each block shows in training, (B, A); None = none ever. Drawn from every row's
        place in the stream alone: a resumed run and any number of processes draw the same."""
        decay = self.recipe.objective.prefix_decay
        if decay == 0:
            return None
        generators = [keyed_generator(self.recipe.seed, 5, place) for place in step.places]
        return clean_prefixes(step.anchors, decay, step.batch.tokens_BL.shape[1], generators)

    def model_step(self, step: Step, temperature: float) -> RowStatistics:
        """Statistics (B, A, K) of one micro-batch, of drafts from nothing: what is validated; p at `temperature`."""
        return self.block_statistics(step, temperature, None)

    def block_statistics(self, step: Step, temperature: float, clean_BA: Tensor | None) -> RowStatistics:
        """The same after `prefixes`: target, then drafter, then head."""
        drafter, batch, anchors = self.drafter, step.batch, step.anchors
        assert isinstance(drafter, BlockDrafter)
        view = self.view(step, temperature)
        hidden = drafter(batch, view.features, anchors, clean_BA)
        factors = drafter.markov_factors(batch, anchors, hidden)
        drafted = DraftRows(
            hidden.flatten(0, 2),
            self.used_rows(step, view).flatten(),
            None if factors is None else factors[0].flatten(0, 2),
            None if factors is None else factors[1],
        )
        found = row_statistics(
            drafted,
            view.places,
            drafter.head_weight_VdD,
            drafter.draft_vocab,
            tuple(anchors.valid_BAK.shape),
            self.objective.wanted,
            temperature,
            self.recipe.objective.chunk_rows,
        )
        return replace(found, confidence=drafter.confidence_logits(batch, anchors, hidden))

    @property
    def view_config(self) -> BlockConfig | None:
        """What the drafter is shown of the target besides p."""
        return self.drafter.config if isinstance(self.drafter, BlockDrafter) else None

    def view(self, step: Step, temperature: float) -> View:
        """The target over a micro-batch, p at `temperature`."""
        if self.kept is not None and step.keys:
            return self.kept.outputs(step, temperature)
        return compute_target_outputs(self.drafter.target, step, self.view_config, temperature)

    @staticmethod
    def used_rows(step: Step, view: View) -> Tensor:
        """Of every drafted position, which of the view's places has the p that it imitates, (B, A, K)."""
        length = step.batch.tokens_BL.shape[1]
        offset = torch.arange(len(step.batch.tokens_BL), device=view.used_P.device)[:, None, None] * length
        place_BAK = step.anchors.places_BAK(length) + offset
        return torch.searchsorted(view.used_P, place_BAK).clamp_max(len(view.used_P) - 1)

    def complete(self, step: Step) -> Tensor:
        """Anchors that tell τ, (B, A): the target wrote the anchor itself (decoding never drafts right after a template),
        and the data do not cut its block: K valid drafts, or fewer that end in end-of-sequence."""
        valid, tokens = step.anchors.valid_BAK, step.batch.tokens_BL
        written = step.batch.answer_BL.gather(1, step.anchors.index_BA)
        count = valid.sum(-1)
        last = tokens.gather(1, (step.anchors.index_BA + count).clamp_max(tokens.shape[1] - 1))
        ends = torch.isin(last, torch.tensor(self.drafter.target.eos_ids, device=tokens.device))
        return written & (valid.all(-1) | ((count > 0) & ends))

    # ---- training ----

    def on_train_start(self) -> None:
        self._clock = time.monotonic()
        if self._resumed_rng is not None:
            set_random_state(self._resumed_rng)
            self._resumed_rng = None

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.rate = learning_rate(self.recipe.trainer, self.global_step, self.seconds)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.rate

    def training_step(self, step: Step, index: int) -> Tensor:
        clean_BA = self.prefixes(step)
        temperature = self.recipe.objective.temperature
        if clean_BA is None:
            s = self.model_step(step, temperature)
        else:
            s = self.block_statistics(step, temperature, clean_BA)
        valid, whole = step.anchors.valid_BAK, self.complete(step)
        if clean_BA is not None:
            s, valid = after_prefix(s, valid, clean_BA)
            whole = whole & (clean_BA == 0)  # τ is that of whole drafts
        loss = self.objective.per_position(s, valid).sum() * step.scale
        accepted = expected_accepted_token(s.log_q_label, s.p_label, s.acceptance, valid)
        self._count(step, loss.detach(), valid.sum(), (accepted * whole).sum(), whole.sum())
        return loss

    @torch.no_grad()
    def _count(self, step: Step, loss: Tensor, positions: Tensor, accepted: Tensor, anchors: Tensor) -> None:
        """Add this micro-batch, over all processes, to the counters: one transfer and one reduction. `accepted`: expected
        drafts accepted, summed over `anchors` anchors."""
        now = time.monotonic()
        spent, self._clock = now - self._clock, now
        sums = [loss, accepted, anchors, positions, (step.batch.document_BL >= 0).sum()]
        host = [torch.tensor([float(self.stop_wanted), spent], dtype=torch.float64, device=loss.device)]
        vector = torch.cat([torch.stack([x.double() for x in sums]), *host])
        values = self._summed(vector).tolist()
        mean_loss = values[0] / self.trainer.world_size
        if not math.isfinite(mean_loss):
            self._stop_non_finite(step, bool(loss.isfinite()))
        for name, value in zip(self.window, (mean_loss, values[1], values[2], 1.0), strict=True):
            self.window[name] += value
        self.positions += int(values[3])
        self.tokens_seen += int(values[4])
        self.stopping = values[5] > 0
        self.seconds += values[6] / self.trainer.world_size

    def _summed(self, vector: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(vector)
        return vector

    def means(self) -> dict[str, float]:
        """Loss and, where it was estimated, expected τ since the last call, which this ends."""
        w = self.window
        found = {"loss": w["loss"] / max(w["batches"], 1)}
        if w["anchors"]:
            found["tau"] = 1 + w["accepted"] / w["anchors"]
        self.window = dict.fromkeys(w, 0.0)
        return found

    def _stop_non_finite(self, step: Step, mine_is_fine: bool) -> None:
        number = self.global_step + 1
        rank = f"-rank-{self.global_rank}" if self.trainer.world_size > 1 else ""
        path = Path(self.recipe.output) / f"nonfinite-step-{number}{rank}.safetensors"
        if not mine_is_fine:
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {**vars(step.batch), **vars(step.anchors)}
            save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, str(path))
        where = path if not rank else path.parent / f"nonfinite-step-{number}-rank-*.safetensors"
        raise NonFiniteLoss(f"the loss at step {number} is not finite; its batch is in {where}")

    def out_of_time(self) -> bool:
        """Whether max_minutes have been trained; the same answer in all processes."""
        limit = self.recipe.trainer.max_minutes
        return limit is not None and self.seconds >= 60 * limit

    def configure_optimizers(self) -> torch.optim.Optimizer:
        t = self.recipe.trainer
        return torch.optim.AdamW(
            [p for p in self.drafter.parameters() if p.requires_grad],
            lr=t.learning_rate,
            betas=(t.betas[0], t.betas[1]),
            weight_decay=t.weight_decay,
        )

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

    def keep_final(self) -> None:
        """Copy the weights that are to be saved, averaged where EMA is on, out of the strategy's hands."""
        with self.whole_weights():
            self.final_weights = self.ema.weights(self.drafter)

    def on_train_end(self) -> None:
        self.keep_final()

    # ---- validation ----

    def on_validation_epoch_start(self) -> None:
        self._tallies = Tallies(self.drafter.config.block_size)
        with self.whole_weights(write=True):
            self.ema.swap_in(self.drafter)

    def validation_step(self, step: Step, index: int) -> None:
        if step.scale == 0:  # a repeated row, there to keep the processes in step
            self.model_step(step, 1.0)
            return
        s, valid = self.model_step(step, 1.0), step.anchors.valid_BAK
        self._tallies.loss(self.objective.per_position(s, valid).sum(), valid[..., 0].sum())
        self._tally(step, s)

    def _tally(self, step: Step, s: RowStatistics) -> None:
        """Expected τ and acceptance by position."""
        valid, whole, tallies = step.anchors.valid_BAK, self.complete(step), self._tallies
        if step.kind == "greedy":
            tallies.accepted("greedy", kept_greedy(s.match, s.greedy_label, valid)[whole])
        if step.kind == "sampling":
            kept = kept_token(s.log_q_label, s.p_label, s.acceptance, valid)
            tallies.accepted("sampling", kept[whole])
        tallies.positions(step.kind, s.acceptance, valid)

    def on_validation_epoch_end(self) -> None:
        # before the checkpoint of this step, which is saved after validation
        with self.whole_weights(write=True):
            self.ema.swap_out(self.drafter)
        device = next(self.drafter.parameters()).device
        self.validation_numbers = self._tallies.numbers(self._summed(self._tallies.vector().to(device)).cpu())

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
        checkpoint["calibrate"] = {
            "identity": self.identity,
            "ema": self.ema.state_dict(),
            "rng": random_state(),
            "positions": self.positions,
            "tokens_seen": self.tokens_seen,
            "seconds": self.seconds,
            "window": dict(self.window),
            "validation": dict(self.validation_numbers),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mine = checkpoint["calibrate"]
        self.ema.load_state_dict(mine["ema"])
        self.positions, self.tokens_seen, self.seconds = (
            mine["positions"],
            mine["tokens_seen"],
            mine["seconds"],
        )
        self.window, self.validation_numbers = dict(mine["window"]), dict(mine["validation"])
        self._resumed_rng = mine["rng"]
