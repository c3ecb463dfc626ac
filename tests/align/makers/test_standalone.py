"""A fresh standalone drafter depends on its seed alone, and options that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from align.config.drafter import DrafterConfig
from align.makers.standalone import make_standalone
from specalign.formats.standalone import save_standalone
from specalign.lm.model import Target


@pytest.mark.parametrize("kind", ["ddit", "masked_lm"])
def test_a_fresh_one_depends_on_its_seed_alone(kind: str, target: Target) -> None:
    drafter = DrafterConfig(kind=kind, layers=2, hidden_size=32, heads=2, cond_dim=16)
    one, again, other = (make_standalone(target, drafter, seed) for seed in (0, 0, 1))
    assert one.config == again.config and one.config.vocab_size == target.vocab_size
    own = dict(again.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in one.named_parameters())
    same = all(torch.equal(p, dict(other.named_parameters())[n]) for n, p in one.named_parameters())
    assert same == (kind == "masked_lm")  # whose weights are the target's


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        (
            {
                "kind": "ddit",
                "layers": 1,
                "hidden_size": 32,
                "heads": 2,
                "cond_dim": 16,
                "time_input": "zero",
            },
            {"kind": "ddit", "layers": 3, "hidden_size": 64, "schedule": "geometric"},
            "hidden_size=32, layers=1, schedule=loglinear; the recipe asks for hidden_size=64, layers=3, schedule=geometric",
        ),
        (
            {"kind": "masked_lm", "layers": 1, "mask_token_id": 5},
            {"kind": "masked_lm", "layers": 3, "mask_token_id": 7},
            "layers=1, mask_token_id=5; the recipe asks for layers=3, mask_token_id=7",
        ),
    ],
)
def test_what_an_init_keeps_though_the_recipe_asks_otherwise_is_said(
    own: dict[str, Any],
    other: dict[str, Any],
    said: str,
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_standalone(make_standalone(target, DrafterConfig(**own)), tmp_path)
    for same in ({"kind": own["kind"]}, own):
        make_standalone(target, DrafterConfig(init=str(tmp_path), **same))
        assert capsys.readouterr().err == ""
    make_standalone(target, DrafterConfig(init=str(tmp_path), **other))
    assert capsys.readouterr().err == f"note: drafter.init={tmp_path} keeps its own {said}\n"
