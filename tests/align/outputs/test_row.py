"""One row of outputs: its key, its tensors by name, its rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from align.outputs.row import RowOutputs, compute_row, round_to, row_key
from align.target.model import Target
from tests.builders import block_network, packed_batch


def test_a_key_is_of_what_a_row_holds(target: Target) -> None:
    alone = packed_batch(target).row(0)
    assert row_key(alone, 1.0) == row_key(packed_batch(target).row(0), 1.0) != row_key(alone, 0.5)
    other = replace(alone, document_BL=alone.document_BL.roll(1))
    assert row_key(other, 1.0) != row_key(alone, 1.0)


@pytest.mark.parametrize("context", ["shared_kv", "taps"])
def test_tensors_by_name_and_back(target: Target, context: str) -> None:
    alone, config = packed_batch(target).row(1), block_network(target, context).config
    row = compute_row(target, alone, config, 1.0, torch.float32)
    named = row.to_named()
    again = RowOutputs.from_named(named).to_named()
    assert named.keys() == again.keys() and all(torch.equal(named[n], again[n]) for n in named)
    assert ("taps" in named) is (context == "taps")
    assert row.bytes == sum(t.numel() * t.element_size() for t in named.values())
    logits = target.forward(alone.tokens_BL).logits_BLV[0]
    torch.testing.assert_close(row.log_z_L.float(), logits.logsumexp(-1), atol=1e-4, rtol=1e-4)
    assert torch.equal(row.best_L, logits.argmax(-1))
    with pytest.raises(KeyError):
        RowOutputs.from_named({name: t for name, t in named.items() if name != "hidden"})


def test_what_overflows_fp16_stays_fp32() -> None:
    assert round_to(torch.tensor([1.0, 2.0]), torch.float16).dtype == torch.float16
    assert round_to(torch.tensor([1e6]), torch.float16).dtype == torch.float32
