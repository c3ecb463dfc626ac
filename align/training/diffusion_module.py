"""Training of standalone diffusion drafters, in all three stages.

    pretrain    whole rows, each document after a clean prefix: the diffusion loss, per token
    finetune    blocks after clean prefixes, as in decoding: the diffusion loss, summed over a block
    calibrate   the same + λ · the objective's terms (distillation) at masked positions

The diffusion loss is SEDD's denoising score entropy or MDLM's bound. All stages validate the bound
on held-out blocks given the text before them, and expected τ and acceptance of one-step drafts.
"""

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from align.losses.diffusion_losses import masked_cross_entropy, score_entropy
from align.losses.divergences import RowStatistics, logit_statistics
from align.outputs.cache import TargetOutputs
from align.training.base_module import DrafterModule
from specalign.common.batch import Anchors, Corrupted, MaskedPositions, Step
from specalign.common.rng import keyed_generator
from specalign.diffusion.noise import (
    corrupt_blocks,
    corrupt_suffix,
    random_prefixes,
    van_der_corput,
)
from specalign.models.masked_lm import annealed_see
from specalign.models.standalone import Annealed, DiffusionDrafter

_VALIDATION_SEED = 0x0B0E


class DiffusionDrafterModule(DrafterModule):
    """Trains a standalone `drafter`."""

    drafter: DiffusionDrafter

    def noise(self, step: Step, training: bool = True) -> Corrupted:
        """Noise drawn from each row's place in the stream, so that resumed runs and any number of
        processes draw the same. Validation draws by the number of masks: the same bound with a much
        smaller error."""
        drafter, anchors = self.drafter, step.anchors
        times = self.recipe.objective.times if training else "count"
        seed = self.recipe.seed if training else _VALIDATION_SEED
        lengths = [0.0] * (anchors.block_size - 1) + [1.0]  # always K
        parts = []
        for b, place in enumerate(step.places):
            generator, row = keyed_generator(seed, 3, place), step.batch.row(b)
            how = (drafter.mask_id, drafter.schedule)
            if training and self.recipe.stage == "pretrain":
                # decoding always continues a text
                prefix = random_prefixes(row, generator).clamp_min(1)
                u_1 = self._time_of(place, generator)
                parts.append(corrupt_suffix(row, *how, prefix, generator, times, u_1))
            else:
                own = Anchors(anchors.index_BA[b : b + 1], anchors.valid_BAK[b : b + 1])
                parts.append(corrupt_blocks(row, own, *how, lengths, generator, times))
        device = step.batch.tokens_BL.device
        joined = {f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Corrupted)}
        return Corrupted(**{name: tensor.to(device) for name, tensor in joined.items()})

    def _time_of(self, place: int, generator: torch.Generator) -> Tensor:
        """A row's time in 0..1, (1,), evenly spread over the rows of the stream."""
        torch.rand(1, generator=generator, dtype=torch.float64)  # earlier versions drew one here
        shift = torch.rand(1, generator=keyed_generator(self.recipe.seed, 6), dtype=torch.float64)
        return (shift + van_der_corput(1, place)) % 1

    def loss_mask(self, noisy: Corrupted) -> Tensor:
        """Where masks count, as `noisy.valid`."""
        return noisy.valid & (noisy.tokens_t == self.drafter.mask_id)

    def loss_positions(self, noisy: Corrupted) -> Tensor:
        """The same as flat positions, (R,)."""
        return self.loss_mask(noisy).flatten().nonzero()[:, 0]

    def prepare_step(self, step: Step) -> Step:
        step.noisy = self.noise(step)
        step.masked = MaskedPositions(self.loss_positions(step.noisy))
        if self.recipe.stage != "pretrain":  # whose positions are not those of blocks
            places_R = step.used.index_BAK.flatten()[step.masked.at_R]
            own_U, where_R = places_R.unique(return_inverse=True)
            step.masked.own_U, step.masked.where_R = own_U, where_R
        return step

    def diffusion(
        self, f_RV: Tensor, noisy: Corrupted, at_R: Tensor, score: bool | None = None
    ) -> Tensor:
        """The diffusion loss of the rows f at the flat positions `at_R`, (R,). `score` False: the bound,
        whatever the training loss. For a network that predicts logits both are equal: normalised,
        their score has Z = 1 (RADD, arXiv 2406.03736)."""
        # fp64: near t = 1 the rate of a geometric schedule loses four digits in fp32
        row_R = at_R // noisy.valid.shape[-1]
        times, importance = noisy.times.flatten()[row_R].double(), noisy.importance.flatten()[row_R]
        if score is None:
            has_scores = self.drafter.config.prediction == "log_score"
            score = has_scores and self.recipe.objective.diffusion == "score_entropy"
        loss = score_entropy if score else masked_cross_entropy
        value = loss(f_RV, noisy.tokens_0.flatten()[at_R], self.drafter.mask_id)
        return (importance * (self.drafter.schedule.weight(times) * value)).float()

    def statistics(
        self, step: Step, outputs: TargetOutputs, f_RV: Tensor, masked: MaskedPositions
    ) -> RowStatistics:
        """Statistics of q and p at these positions, spread over (B, A, K); unmasked positions have
        q = 1 and no loss."""
        near = None
        if masked.own_U is not None and masked.where_R is not None:
            near = masked.own_U, masked.where_R
        statistics = logit_statistics(
            self.drafter.target_logits(f_RV),
            step.used.index_BAK.flatten()[masked.at_R],
            outputs.places,
            self.drafter.target.head_weight_VD,
            near,
        )
        shape = step.anchors.valid_BAK.shape
        zeros = torch.zeros(shape.numel(), device=f_RV.device)
        return statistics.map(lambda x_R: zeros.index_copy(0, masked.at_R, x_R).view(shape))

    def strength(self) -> float:
        """The distillation weight λ at this step."""
        o = self.recipe.objective
        if self.recipe.stage != "calibrate":
            return 0.0
        return o.distillation * min(1.0, (self.global_step + 1) / max(1, o.distillation_warmup))

    def annealing_mask(self, step: Step) -> Annealed | None:
        """Which noisy tokens attend to the right during annealing; None = all, as those of a
        drafter from drafter.init."""
        steps = self.recipe.objective.annealing
        if self.recipe.drafter.init is not None or self.global_step + 1 >= steps:
            return None
        progress = (self.global_step + 1) / steps
        generator = keyed_generator(self.recipe.seed, 4, *step.places)
        device = step.batch.tokens_BL.device
        return lambda length: annealed_see(length, progress, generator).to(device)

    def training_step(self, step: Step, index: int) -> Tensor:
        noisy, masked = step.noisy, step.masked
        assert noisy is not None and masked is not None
        see = self.annealing_mask(step)
        if self.recipe.stage == "pretrain":
            hidden, sigma = self.drafter.suffix_rows(step.batch, noisy, see)
            scale = 1.0 / noisy.valid.numel()  # per token of the step's rows, with padding
        else:
            hidden, sigma = self.drafter.block_rows(step.batch, step.anchors, noisy, see)
            scale = step.scale
        f_RV = self.drafter.logits(*_select(masked.at_R, hidden, sigma))
        loss = self.diffusion(f_RV, noisy, masked.at_R).sum()
        strength = self.strength()
        if strength > 0:
            outputs = self.target_outputs(step, self.recipe.objective.temperature)
            s = self.statistics(step, outputs, f_RV, masked)
            losses = self.objective.per_position(s, noisy.valid) * self.loss_mask(noisy)
            loss = loss + strength * losses.sum()
        loss = loss * scale
        zero = torch.zeros((), device=loss.device)
        self._count(step, loss.detach(), zero, zero, noisy.valid.sum())
        return loss

    def model_step(self, step: Step, temperature: float) -> RowStatistics:
        """Statistics (B, A, K) of one-step drafts: every position masked."""
        drafter, clean = self.drafter, step.anchors.blocks_BAK(step.batch.tokens_BL)
        times = torch.ones(step.anchors.index_BA.shape, device=clean.device)
        masks, valid = torch.full_like(clean, drafter.mask_id), step.anchors.valid_BAK
        noisy = Corrupted(masks, clean, times, valid, torch.ones_like(times))
        outputs = self.target_outputs(step, temperature)
        totals = {
            f.name: torch.zeros_like(clean, dtype=torch.float32) for f in fields(RowStatistics)
        }
        for at_R, f_RV in self._chunks(step, noisy):
            found = self.statistics(step, outputs, f_RV, MaskedPositions(at_R))
            for name, value in vars(found).items():
                totals[name] += 0.0 if value is None else value
        return RowStatistics(**totals)

    def losses(self, step: Step, noisy: Corrupted) -> tuple[Tensor, Tensor]:
        """The diffusion loss and the bound, (B, A, K)."""
        loss = torch.zeros_like(noisy.valid, dtype=torch.float32)
        bound = torch.zeros_like(loss)
        for at_R, f_RV in self._chunks(step, noisy):
            loss.view(-1)[at_R] = self.diffusion(f_RV, noisy, at_R)
            bound.view(-1)[at_R] = self.diffusion(f_RV, noisy, at_R, False)
        return loss, bound

    def _chunks(self, step: Step, noisy: Corrupted) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of the head's rows: their flat positions (R,) and f (R, V)."""
        hidden, sigma = self.drafter.block_rows(step.batch, step.anchors, noisy)
        size = max(1, self.recipe.objective.chunk_rows // 4)
        for at_R in self.loss_positions(noisy).split(size):
            yield at_R, self.drafter.logits(*_select(at_R, hidden, sigma))

    def validation_step(self, step: Step, index: int) -> None:
        valid = step.anchors.valid_BAK
        loss, bound = self.losses(step, self.noise(step, training=False))
        s = self.model_step(step, 1.0)
        if step.scale == 0:  # a repeated row that keeps the processes in step
            return
        strength = self.recipe.objective.distillation if self.recipe.stage == "calibrate" else 0.0
        total = loss.sum()
        if strength > 0:
            total = total + strength * self.objective.per_position(s, valid).sum()
        self._add_acceptance(step, s)
        self._sums.add_loss(total, valid[..., 0].sum())
        self._sums.add_bound(bound.sum(-1), valid.sum(-1))


def _select(at_R: Tensor, hidden: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states (…, D) and σ (…) at flat positions, (R, D) and (R,)."""
    return hidden.flatten(0, -2)[at_R], sigma.flatten()[at_R]
