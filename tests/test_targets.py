"""The rounding that `python -m tests.targets` allows a model."""

from __future__ import annotations

import pytest

from tests.target_models import tiny_model
from tests.targets import own_rounding


@pytest.mark.parametrize(("kind", "recurrent"), [("qwen3_moe", False), ("qwen3_next", True)])
def test_rounding_of_experts_and_of_a_models_own_cache(kind: str, recurrent: bool) -> None:
    """Grouped expert products have no fp64."""
    assert 1e-8 < own_rounding(tiny_model(kind, 260), recurrent) < 1e-4
