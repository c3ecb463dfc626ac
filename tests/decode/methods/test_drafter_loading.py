"""A standalone drafter's linear layers are made fast for few rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.kernels.linear import RowsLinear, fast_linear
from align.models.checkpoints.standalone import save_standalone
from align.models.diffusion_context import DiffusionContext
from align.target.model import Target
from decode.methods.drafter_loading import open_part
from tests.builders import diffusion_drafter as drafter


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
