"""Training by the objective's terms: of block drafters, a block after each anchor, conditioned on
the target, through its head; and of autoregressive drafters."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from align.losses.distillation import after_prefix
from align.losses.divergences import DraftRows, RowStatistics, logit_statistics, row_statistics
from align.training.base_module import DrafterModule
from specalign.common.batch import Step
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig
from specalign.models.causal import CausalDrafter


class BlockDrafterModule(DrafterModule):
    """Trains `drafter`, conditioned on its target, by the objective's terms."""

    drafter: BlockDrafter

    @property
    def conditioning(self) -> BlockConfig:
        """The target's layers that the drafter reads."""
        return self.drafter.config

    def model_step(self, step: Step, temperature: float) -> RowStatistics:
        return self.block_statistics(step, temperature, None)

    def draft_statistics(self, step: Step) -> tuple[RowStatistics, Tensor, Tensor]:
        clean_BA = step.clean_BA
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
        used = step.used
        drafted = DraftRows(hidden.flatten(0, 2), used.index_BAK.flatten(), used.host_R)
        if factors is not None:
            drafted.z_Rr = factors[0].flatten(0, 2)
            drafted.basis_rV = factors[1]
        statistics = row_statistics(
            drafted,
            outputs.places,
            drafter.head_weight_VdD,
            drafter.draft_vocab,
            tuple(anchors.valid_BAK.shape),
            self.recipe.objective.chunk_rows,
        )
        return replace(statistics, confidence=drafter.confidence_logits(batch, anchors, hidden))


class CausalDrafterModule(DrafterModule):
    """Trains `drafter`, a causal language model, towards p at every position of an answer.

    One causal pass over a packed row gives q at every position, so the K positions of an anchor are
    K positions of the row. On the target's own text expected τ is unbiased.
    """

    drafter: CausalDrafter

    def model_step(self, step: Step, temperature: float) -> RowStatistics:
        """Statistics (B, A, K) of one micro-batch, with p at `temperature`."""
        drafter, outputs = self.drafter, self.target_outputs(step, temperature)
        hidden_PD = drafter(step.batch).flatten(0, 1)[step.used.flat_P]
        place_P = torch.arange(len(hidden_PD), device=hidden_PD.device)
        places = outputs.places
        if drafter.has_targets_head:
            rows = DraftRows(hidden_PD, place_P, np.arange(len(hidden_PD)))
            head_VD = drafter.head_weight_VD
            chunk = self.recipe.objective.chunk_rows
            found = row_statistics(rows, places, head_VD, None, place_P.shape, chunk)
        else:
            logits_PV, head_VD = drafter.logits(hidden_PD), drafter.target.head_weight_VD
            found = logit_statistics(logits_PV, place_P, places, head_VD)
        return found.map(lambda value_P: value_P[step.used.index_BAK])
