"""A drafter whose noise has no masks can not draft."""

from __future__ import annotations

from pathlib import Path

import pytest

import decode
from align.common.errors import UserError
from align.models.checkpoints.standalone import save_standalone
from align.target.model import Target


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
