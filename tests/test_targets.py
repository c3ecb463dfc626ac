"""The tables of docs/targets.md: what their command needs beside a model."""

from __future__ import annotations

import pytest

from tests.target_models import tiny_model
from tests.targets import own_rounding


@pytest.mark.parametrize(
    ("kind", "recurrent"), [("qwen3_moe", False), ("qwen3_next", True), ("minimax", True)]
)
def test_a_models_own_rounding_is_told_of_experts_and_of_its_own_cache(kind: str, recurrent: bool) -> None:
    """Grouped products of experts know no fp64; MiniMax's cache goes on by single tokens alone."""
    assert 1e-8 < own_rounding(tiny_model(kind, 260), recurrent) < 1e-4
