"""Rotary tables: the target's own where they are the same ones, frequencies where they are not, a refusal where they change with the text's length."""

import math
from typing import Any

import pytest
import torch

from specalign.common.errors import UserError
from specalign.formats.rotary import read_rotary
from specalign.lm.inspection.keys import frequencies
from specalign.lm.model import Target


def test_tables(target: Target) -> None:
    width = target.hidden_size // target.num_heads
    base = {"max_position_embeddings": target.context_limit}
    own, rope = read_rotary({**base, "rope_theta": target.rope_theta}, width, target)
    assert own == [] and rope["rope_theta"] == target.rope_theta
    (other,), _ = read_rotary({**base, "rope_theta": 1e6}, width, target)
    assert other["inv_freq"] == pytest.approx(frequencies(width, 1e6))
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    (slower,), kept = read_rotary({**base, "rope_parameters": linear}, width, target)
    torch.testing.assert_close(
        torch.tensor(slower["inv_freq"]) * 4, torch.tensor(other["inv_freq"])
    )
    assert kept == linear
    yarn = {**linear, "rope_type": "yarn", "original_max_position_embeddings": 128}
    (scaled,), _ = read_rotary({**base, "rope_parameters": yarn}, width, target)
    assert scaled["scale"] == pytest.approx(0.1 * math.log(4) + 1)  # the paper's attention factor
    (narrow,), _ = read_rotary({**base, "rope_theta": target.rope_theta}, 4, target)
    assert len(narrow["inv_freq"]) == 2  # the target's heads are wider


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "no_such_type"}, "x", [1]]
)
def test_what_frequencies_do_not_hold_is_refused(target: Target, rope: Any) -> None:
    if isinstance(rope, dict):
        rope = {**rope, "rope_theta": 1e4}
    inner = {"max_position_embeddings": 512, "rope_parameters": rope}
    with pytest.raises(UserError, match="^(invalid )?rope_parameters") as refused:
        read_rotary(inner, 16, target)
    assert "\n" not in str(refused.value)
