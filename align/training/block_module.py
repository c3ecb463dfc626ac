"""Training of block drafters: a block after each anchor, conditioned on the target, through the
target's head."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from align.losses.divergences import DraftRows, RowStatistics, row_statistics
from align.losses.objective import after_prefix
from align.training.base_module import DrafterModule
from specalign.common.batch import Step
from specalign.common.rng import keyed_generator
from specalign.diffusion.noise import clean_prefixes
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig


class BlockDrafterModule(DrafterModule):
    """Trains `drafter`, conditioned on its target, by the objective's terms."""

    drafter: BlockDrafter

    @property
    def conditioning(self) -> BlockConfig:
        """The target's layers that the drafter reads."""
        return self.drafter.config

    def draw_prefixes(self, step: Step) -> Tensor | None:
        """The number of clean tokens at each block's start while training, (B, A); None = always 0.
        Drawn from each row's place in the stream."""
        decay = self.recipe.objective.prefix_decay
        if decay == 0:
            return None
        generators = [keyed_generator(self.recipe.seed, 5, place) for place in step.places]
        return clean_prefixes(step.anchors, decay, step.batch.tokens_BL.shape[1], generators)

    def model_step(self, step: Step, temperature: float) -> RowStatistics:
        return self.block_statistics(step, temperature, None)

    def draft_statistics(self, step: Step) -> tuple[RowStatistics, Tensor, Tensor]:
        clean_BA = self.draw_prefixes(step)
        s = self.block_statistics(step, self.recipe.objective.temperature, clean_BA)
        if clean_BA is None:
            return s, step.anchors.valid_BAK, self.complete(step)
        s, valid = after_prefix(s, step.anchors.valid_BAK, clean_BA)
        return s, valid, self.complete(step) & (clean_BA == 0)  # τ is of whole drafts

    def block_statistics(
        self, step: Step, temperature: float, clean_BA: Tensor | None
    ) -> RowStatistics:
        """Target, drafter, head: statistics (B, A, K) after clean prefixes."""
        drafter, batch, anchors = self.drafter, step.batch, step.anchors
        outputs = self.target_outputs(step, temperature)
        hidden = drafter(batch, outputs.features, anchors, clean_BA)
        factors = drafter.markov_factors(batch, anchors, hidden)
        drafted = DraftRows(hidden.flatten(0, 2), self.used_rows(step, outputs).flatten())
        if factors is not None:
            drafted.z_Rr = factors[0].flatten(0, 2)
            drafted.basis_rV = factors[1]
        statistics = row_statistics(
            drafted,
            outputs.places,
            drafter.head_weight_VdD,
            drafter.draft_vocab,
            tuple(anchors.valid_BAK.shape),
            self.objective.wanted,
            self.recipe.objective.chunk_rows,
        )
        return replace(statistics, confidence=drafter.confidence_logits(batch, anchors, hidden))
