"""The causal drafter in training: statistics by their definition."""

from __future__ import annotations

import torch

from align.config.parser import load_recipe
from align.training.block_module import CausalDrafterModule
from specalign.common.batch import Anchors, Step
from specalign.lm.model import Target
from tests.builders import ANCHORS
from tests.builders import causal_drafter as drafter
from tests.builders import packed_batch as batch


def test_statistics_are_those_of_p_and_q_at_every_position(target: Target) -> None:
    made, rows = drafter(target), batch(target)
    valid = ANCHORS.valid_BAK.clone()
    valid[0, 1, 2:] = False
    step = Step(rows, Anchors(ANCHORS.index_BA, valid))
    module = CausalDrafterModule(made, load_recipe(["recipe=debug_autoregressive"]))
    s = module.model_step(step, 1.0)
    with torch.no_grad():
        q = made.logits(made(rows)).softmax(-1)
    mask = rows.attention_mask()
    logits = target.forward(rows.tokens_BL, mask=mask, positions_BL=rows.positions_BL).logits_BLV
    assert logits is not None and s.forward_kl is not None
    p = logits.softmax(-1)
    for b, a, k in valid.nonzero().tolist():
        at = int(ANCHORS.index_BA[b, a]) + k
        label = int(rows.tokens_BL[b, at + 1])
        own_p, own_q = p[b, at], q[b, at]
        expected = {
            "acceptance": torch.minimum(own_p, own_q).sum(),
            "forward_kl": (own_p * (own_p / own_q).log()).sum(),
            "log_q_label": own_q[label].log(),
            "p_label": own_p[label],
            "match": (own_p.argmax() == own_q.argmax()).float(),
        }
        for name, value in expected.items():
            torch.testing.assert_close(getattr(s, name)[b, a, k], value, atol=1e-4, rtol=1e-3)
