"""Training of autoregressive drafters: the next token after every position of an answer, towards
the target's p.

One causal pass over a packed row gives q at every position, so the K positions of an anchor are K
positions of the row. On the target's own text expected τ is unbiased (align/losses/acceptance.py).
"""

from __future__ import annotations

import torch

from align.losses.divergences import DraftRows, RowStatistics, logit_statistics, row_statistics
from align.training.base_module import DrafterModule
from specalign.common.batch import Step
from specalign.models.causal import CausalDrafter


class CausalDrafterModule(DrafterModule):
    """Trains `drafter`, a causal language model, by the objective's terms."""

    drafter: CausalDrafter

    def model_step(self, step: Step, temperature: float) -> RowStatistics:
        """Statistics (B, A, K) of one micro-batch, with p at `temperature`."""
        drafter, outputs = self.drafter, self.target_outputs(step, temperature)
        hidden_PD = drafter(step.batch).flatten(0, 1)[outputs.used_P]
        place_P = torch.arange(len(hidden_PD), device=hidden_PD.device)
        places, wanted = outputs.places, self.objective.wanted
        if drafter.has_targets_head:
            rows, head_VD = DraftRows(hidden_PD, place_P), drafter.head_weight_VD
            chunk = self.recipe.objective.chunk_rows
            found = row_statistics(rows, places, head_VD, None, place_P.shape, wanted, chunk)
        else:
            logits_PV, head_VD = drafter.logits(hidden_PD), drafter.target.head_weight_VD
            found = logit_statistics(logits_PV, place_P, places, head_VD, wanted)
        at_BAK = self.used_rows(step, outputs)
        return found.map(lambda value_P: value_P[at_BAK])
