"""The causal drafter in training: statistics by their definition, golden losses, resume, stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.training.base_module import DrafterModule
from align.training.block_module import CausalDrafterModule
from align.training.run import train
from specalign.common.batch import Anchors, Step
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.causal import CausalDrafter
from tests.builders import ANCHORS, read_metric
from tests.builders import causal_drafter as drafter
from tests.builders import packed_batch as batch

GOLDEN = Path(__file__).parents[2] / "golden" / "debug_autoregressive.json"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


def module(made: CausalDrafter, *words: str) -> CausalDrafterModule:
    return CausalDrafterModule(made, load_recipe(["recipe=debug_autoregressive", *words]))


def test_statistics_are_those_of_p_and_q_at_every_position(target: Target) -> None:
    made, rows = drafter(target), batch(target)
    valid = ANCHORS.valid_BAK.clone()
    valid[0, 1, 2:] = False
    step = Step(rows, Anchors(ANCHORS.index_BA, valid))
    s = module(made).model_step(step, 1.0)
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


def run(output: Path, data: Path, *words: str) -> DrafterModule:
    words = ("recipe=debug_autoregressive", f"output={output}", f"data.path={data}", *words)
    return train(load_recipe(words), quiet=True)


def test_golden_losses(tmp_path: Path, debug_data: Path) -> None:
    module = run(tmp_path, debug_data)
    golden = json.loads(GOLDEN.read_text())["losses"]
    assert read_metric(tmp_path) == pytest.approx(golden, rel=2e-4)
    numbers = module.validation_numbers
    assert numbers["tau_sampling"] > 1.5  # half of a random target's layers know much of it
    for kind in ("greedy", "sampling"):
        kept = [value for name, value in numbers.items() if name.startswith(f"kept_{kind}_")]
        assert 1 + sum(kept) == pytest.approx(numbers[f"tau_{kind}"], rel=1e-5)
        assert kept == sorted(kept, reverse=True) and kept[0] > 0
    state = torch.load(tmp_path / "checkpoints" / "step-12.ckpt", weights_only=True)["state_dict"]
    assert state and not any("embed" in name or "lm_head" in name for name in state)
