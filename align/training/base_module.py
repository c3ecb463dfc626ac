"""Training of every kind of drafter: data → forward → loss → step, then validation, sharding and
checkpoints. The target is frozen and not part of the module."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import lightning
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from align.config.recipe import Recipe
from align.losses.distillation import Objective, expected_accepted_token, kept_greedy, kept_token
from align.losses.divergences import RowStatistics
from align.outputs.cache import TargetOutputCache, TargetOutputs, compute_target_outputs
from align.outputs.served import ServedLayers
from align.training.metrics import HostCopy, TrainingProgress, ValidationSums
from align.training.optimizer import EMA, learning_rate, make_optimizer, set_rate
from align.training.strategies import Sharded, Zero, is_true_anywhere, shard_target
from specalign.common.batch import Step
from specalign.common.errors import UserError
from specalign.common.rng import seed_global
from specalign.common.schema import JsonObject
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig
from specalign.models.causal import CausalDrafter
from specalign.models.standalone import DiffusionDrafter

Optimizers = torch.optim.Optimizer | LightningOptimizer
Drafter = BlockDrafter | DiffusionDrafter | CausalDrafter


class NonFiniteLoss(UserError):
    """The loss is not finite."""


class Interrupted(RuntimeError):
    """A signal stopped training; a checkpoint was saved."""


class DrafterModule(lightning.LightningModule, ABC):
    """Trains a drafter, which knows its target, on packed rows. text_rows: of other text, which
    come first. layers: the target's, if a server runs them."""

    drafter: Drafter
    eos_ids: Tensor

    def __init__(
        self,
        drafter: Drafter,
        recipe: Recipe,
        text_rows: int = 0,
        layers: ServedLayers | None = None,
    ) -> None:
        super().__init__()
        o, t = recipe.objective, recipe.trainer
        self.drafter = drafter
        self.recipe = recipe
        self.objective = Objective(o.terms, o.weighting, o.decay)
        self.text_rows, self.layers = text_rows, layers
        self.ema = EMA(drafter, t.ema)
        self.final_weights: dict[str, Tensor] = {}
        self.progress = TrainingProgress()
        self.validation_numbers: dict[str, float] = {}
        self.target_cache: TargetOutputCache | None = None
        if t.keeps_outputs:
            self.target_cache = TargetOutputCache(
                drafter.target, self.conditioning, t, recipe.features_folder, recipe.processes
            )
        self.register_buffer("eos_ids", torch.tensor(drafter.target.eos_ids), persistent=False)
        self._is_sharded = False
        self._last_step_ended = 0.0  # on the monotonic clock
        self._unread: tuple[HostCopy, int] | None = None  # sums of a micro-batch of a step
        self._sums = ValidationSums(drafter.config.block_size)

    # ---- one step ----

    def training_step(self, step: Step, index: int) -> Tensor:
        s, valid_BAK, complete_BA = self.draft_statistics(step)
        loss = self.objective.per_position(s, valid_BAK).sum() * step.scale
        accepted_BA = expected_accepted_token(s.log_q_label, s.p_label, s.acceptance, valid_BAK)
        accepted = (accepted_BA * complete_BA).sum()
        self._count(step, loss.detach(), accepted, complete_BA.sum(), valid_BAK.sum())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.trained_parameters(), self.recipe.trainer)

    def on_train_batch_start(self, batch: Step, index: int) -> None:
        seed_global(self.recipe.seed, 8, *batch.places)
        t = self.recipe.trainer
        rate = learning_rate(t, self.global_step, self.progress.seconds)
        set_rate(self.trainer.optimizers[0], t, rate)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizers,
        optimizer_closure: Callable[[], object] | None = None,
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.ema.decay and (batch_idx + 1) % self.recipe.trainer.accumulate == 0:
            with self.gathered_weights():
                self.ema.update(self.drafter)

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.drafter.named_parameters() if p.requires_grad}

    # ---- forward ----

    @abstractmethod
    def model_step(self, step: Step, temperature: float) -> RowStatistics:
        """Statistics (B, A, K) of one micro-batch of whole drafts, with p at `temperature`; used
        for validation."""

    def draft_statistics(self, step: Step) -> tuple[RowStatistics, Tensor, Tensor]:
        """For training: statistics (B, A, K), the positions in the loss (B, A, K), and the anchors
        in τ (B, A)."""
        s = self.model_step(step, self.recipe.objective.temperature)
        return s, step.anchors.valid_BAK, self.complete(step)

    @property
    def conditioning(self) -> BlockConfig | None:
        """The target outputs that the drafter reads, besides p; None = nothing."""
        return None

    def target_outputs(self, step: Step, temperature: float) -> TargetOutputs:
        """The target's outputs for a micro-batch, p at `temperature`."""
        if self.target_cache is not None and step.keys:
            return self.target_cache.outputs(step, temperature)
        if self.layers is not None:
            self.layers.states_BLFD = step.states_BLFD
        return compute_target_outputs(self.drafter.target, step, self.conditioning, temperature)

    def complete(self, step: Step) -> Tensor:
        """Anchors that count for τ, (B, A): generated by the target (decoding never drafts directly
        after a template), with K valid drafts, or fewer that end with end-of-sequence."""
        valid, tokens = step.anchors.valid_BAK, step.batch.tokens_BL
        written = step.batch.answer_BL.gather(1, step.anchors.index_BA)
        if step.written_B is not None:
            written = written & step.written_B[:, None]
        count = valid.sum(-1)
        last = tokens.gather(1, (step.anchors.index_BA + count).clamp_max(tokens.shape[1] - 1))
        ends = torch.isin(last, self.eos_ids)
        return written & (valid.all(-1) | ((count > 0) & ends))

    def prepare_step(self, step: Step) -> Step:
        """A training step with what the host draws for it; called where steps are made."""
        return step

    # ---- progress ----

    def on_train_start(self) -> None:
        self._last_step_ended = time.monotonic()

    @torch.no_grad()
    def _count(self, step: Step, *sums: Tensor) -> None:
        """Add this micro-batch of all processes to `progress`, with one transfer and one reduction;
        on a GPU during the next one, so that the host never waits for this one. `sums`: loss,
        expected accepted drafts, their anchors, positions in the loss."""
        seconds = time.monotonic() - self._last_step_ended
        self._last_step_ended += seconds
        tokens = (step.batch.document_BL >= 0).sum()
        # filled there: a tensor of the host's would be copied
        here = [
            tokens.new_full((), x, dtype=torch.float64)
            for x in (self.progress.stop_wanted, seconds)
        ]
        total = self._reduce(torch.stack([*(x.double() for x in (*sums, tokens)), *here]))
        self.read_progress()
        self._unread = HostCopy(total), self.global_step + 1
        if total.device.type == "cpu":
            self.read_progress()

    def read_progress(self) -> None:
        """Wait for the last micro-batch and add it to `progress`. Raises NonFiniteLoss."""
        if self._unread is None:
            return
        (sums, step), self._unread = self._unread, None
        if not self.progress.add(sums.tolist(), self.trainer.world_size):
            raise NonFiniteLoss(
                f"the loss at step {step} is not finite (trainer.learning_rate, "
                "trainer.gradient_clip)"
            )

    def _reduce(self, vector: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(vector)
        return vector

    # ---- validation ----

    def on_validation_epoch_start(self) -> None:
        self.read_progress()
        self._sums = ValidationSums(self.drafter.config.block_size)
        with self.gathered_weights(write=True):
            self.ema.swap_in(self.drafter)

    def validation_step(self, step: Step, index: int) -> None:
        s = self.model_step(step, 1.0)
        valid = step.anchors.valid_BAK
        if step.scale == 0:  # a repeated row that keeps the processes in step
            return
        self._sums.add_loss(self.objective.per_position(s, valid).sum(), valid[..., 0].sum())
        self._add_acceptance(step, s)

    def _add_acceptance(self, step: Step, s: RowStatistics) -> None:
        """Add expected τ and acceptance by position to the sums."""
        valid, complete = step.anchors.valid_BAK, self.complete(step)
        if step.kind == "greedy":
            self._sums.add_accepted("greedy", kept_greedy(s.match, s.greedy_label, valid)[complete])
        if step.kind == "sampling":
            accepted = kept_token(s.log_q_label, s.p_label, s.acceptance, valid)
            self._sums.add_accepted("sampling", accepted[complete])
        self._sums.add_positions(step.kind, s.acceptance, valid)

    def on_validation_epoch_end(self) -> None:
        with self.gathered_weights(write=True):  # before this step's checkpoint
            self.ema.swap_out(self.drafter)
        sums = self._reduce(self._sums.vector().to(self.device)).cpu()
        self.validation_numbers = self._sums.numbers(sums)

    # ---- sharding ----

    def configure_model(self) -> None:
        """Shard target and drafter, once the processes are connected."""
        strategy = self.trainer.strategy
        if self._is_sharded:
            return
        self._is_sharded = True
        if self.recipe.target.parallel == "fsdp":
            shard_target(self.drafter.target, strategy.root_device)
            if self.target_cache is not None:
                on_device = partial(is_true_anywhere, device=strategy.root_device)
                self.target_cache.missing = on_device
        if isinstance(strategy, Sharded):
            strategy.shard(self)
            self.ema = EMA(self.drafter, self.recipe.trainer.ema)

    def gathered_weights(self, write: bool = False) -> AbstractContextManager[None]:
        """The drafter's full weights where the strategy shards them without DTensors (ZeRO-3)."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, Zero):
            return nullcontext()
        return strategy.gather_parameters(list(self.drafter.parameters()), write)

    # ---- checkpoints ----

    def on_train_end(self) -> None:
        self.read_progress()
        self.copy_final_weights()

    def copy_final_weights(self) -> None:
        """Copy the weights to save, averaged if EMA is on."""
        with self.gathered_weights():
            self.final_weights = self.ema.weights(self.drafter)

    def on_save_checkpoint(self, checkpoint: JsonObject) -> None:
        self.read_progress()
        checkpoint["calibrate"] = {
            "ema": self.ema.state_dict(),
            "validation": dict(self.validation_numbers),
            **self.progress.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: JsonObject) -> None:
        state = checkpoint["calibrate"]
        self.ema.load_state_dict(state["ema"])
        self.progress.load_state_dict(state)
        self.validation_numbers = dict(state["validation"])
