"""What a format can't hold is refused in one line that names the key to change."""

from __future__ import annotations

from typing import Any

import pytest

from align.common.errors import UserError
from align.target.model import Target
from decode.exporting.registry import FORMATS
from tests.builders import block_network

FILL_IN = {"block_layout": "fill_in"}


@pytest.mark.parametrize(
    ("format_name", "context", "options", "says"),
    [
        ("dflash", "taps", {}, "train with drafter.block_layout=fill_in"),
        ("dspark", "taps", FILL_IN, "train with drafter.block_layout=anchor_first"),
        ("dspark", "taps", {**FILL_IN, "markov_rank": 4}, "or use --format custom_generate"),
        ("dflash", "shared_kv", FILL_IN, "or --format custom_generate, which holds this one"),
        ("dflash", "taps", {**FILL_IN, "markov_rank": 4}, "train with drafter.markov_rank=0"),
        ("transformers", "taps", {**FILL_IN, "convolution": True}, "train with drafter.convolution=false"),
        ("speculators", "taps", {**FILL_IN, "self_conditioning": True}, "drafter.self_conditioning=false"),
        ("dspark", "taps", {"markov_rank": 4, "markov": "silu"}, "drafter.markov=silu"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    target: Target, format_name: str, context: str, options: dict[str, Any], says: str
) -> None:
    drafter = block_network(target, context, options=options)
    with pytest.raises(UserError, match=says):
        FORMATS[format_name].make(drafter)


def test_the_last_layer_is_refused(target: Target) -> None:
    last = target.num_layers - 1
    drafter = block_network(target, "taps", options={**FILL_IN, "target_layers": [0, last]})
    with pytest.raises(UserError, match=f"layer {last} is the target's last"):
        FORMATS["dflash"].make(drafter)


@pytest.mark.parametrize("format_name", ["dflash", "speculators", "transformers"])
def test_a_confidence_head_is_left_out_and_that_is_said(target: Target, format_name: str) -> None:
    made = FORMATS[format_name].make(
        block_network(target, "taps", whole=True, confidence=True, options=FILL_IN)
    )
    assert any("confidence head is left out" in note for note in made.notes)
    assert not any("confidence" in name for name in made.tensors)
