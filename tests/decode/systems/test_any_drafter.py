"""A drafter whose noise has no masks can not draft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decode.systems.any_drafter import open_part

import decode
from align.common.errors import UserError
from align.kernels.linear import RowsLinear, fast_linear
from align.models.checkpoints.standalone import save_standalone
from align.models.diffusion_context import DiffusionContext
from align.target.model import Target
from tests.builders import diffusion_drafter as drafter


def test_uniform_noise_has_no_masks_to_draft_from(target: Target, tmp_path: Path) -> None:
    from align.config.drafter import DrafterConfig
    from align.makers.standalone import make_standalone

    save_standalone(
        make_standalone(target, DrafterConfig(kind="ddit", hidden_size=32, heads=2, graph="uniform")),
        tmp_path,
    )
    with pytest.raises(UserError, match="undoes uniform noise and has no masks"):
        decode.load(target, tmp_path)


def test_a_causal_drafter_drafts_chains_alone(target: Target) -> None:
    with pytest.raises(UserError, match="this one drafts chains"):
        decode.load(target, target, tree_nodes=3)
    assert decode.load(target, target, tree_nodes=0).drafter is not None


@pytest.mark.parametrize("kind", ["ddit", "masked_lm", "masked_lm, full"])
def test_drafts_take_the_linear_layers_for_few_rows(target: Target, kind: str, tmp_path: Path) -> None:
    """As the target's and a block drafter's, rounded to bf16 where that halves what is read: a draft took three times as
    long without. It says what it said before, up to that rounding."""
    made = drafter(target, kind)
    save_standalone(made, tmp_path / "d")
    loaded = open_part(str(tmp_path / "d"), "diffusion", target)
    fast = fast_linear(torch.float32, torch.device("cpu"))
    kinds = {type(m) for m in loaded.network.modules()}
    assert fast is None or (fast in kinds and torch.nn.Linear not in kinds)
    rows = []
    for one in (made, loaded):
        context = DiffusionContext(one.eval(), 20)
        context.extend([5, 6, 7])
        rows.append(context.denoise(torch.full((3,), made.mask_id)))
    rounded = fast is RowsLinear
    assert rounded == any(
        m.weight.dtype == torch.bfloat16 for m in loaded.network.modules() if isinstance(m, RowsLinear)
    )
    assert (rows[0].softmax(-1) - rows[1].softmax(-1)).abs().sum(-1).max() < (0.05 if rounded else 1e-4)
