"""The LightningModule of autoregressive drafters: the next token after every place of an answer, towards the target's p.

One causal pass over a packed row gives q at every place given the text before it, so the K positions of an anchor are K
places of the row, each computed once. Teacher-forced on text of the target's own, that is what decoding drafts from
wherever the drafts before were accepted: expected τ is the unbiased one (align/losses/acceptance.py).
"""

from __future__ import annotations

import torch

from align.common.batch import Step
from align.losses.divergences import DraftRows, RowStatistics, logit_statistics, row_statistics
from align.models.causal import CausalDrafter
from align.training.base_module import DrafterModule


class CausalDrafterModule(DrafterModule):
    """Trains `drafter` on packed target-written rows, by the objective's terms (`forward_kl`, `cross_entropy`, …).

    Args:
        drafter: q, a causal language model.
        recipe: objective, trainer and output are read.
    """

    drafter: CausalDrafter

    def model_step(self, step: Step, temperature: float) -> RowStatistics:
        """Statistics (B, A, K) of one micro-batch; p at `temperature`."""
        drafter, outputs = self.drafter, self.target_outputs(step, temperature)
        hidden_PD = drafter(step.batch).flatten(0, 1)[outputs.used_P]
        place_P = torch.arange(len(hidden_PD), device=hidden_PD.device)
        wanted, chunk = self.objective.wanted, self.recipe.objective.chunk_rows
        if drafter.has_targets_head:
            rows = DraftRows(hidden_PD, place_P)
            shape = (len(hidden_PD),)
            found = row_statistics(
                rows, outputs.places, drafter.head_weight_VD, None, shape, wanted, temperature, chunk
            )
        else:
            head_VD = drafter.target.head_weight_VD
            found = logit_statistics(drafter.logits(hidden_PD), place_P, outputs.places, head_VD, wanted)
        at_BAK = self.used_rows(step, outputs)
        return found.map(lambda value_P: value_P[at_BAK])
