"""What formats share: tensors under published names, with those that Qwen3's options ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.target.model import Target
from decode.engine.compiled import stock_model
from decode.exporting.ladder import climb
from decode.exporting.reader import FilesReader
from decode.exporting.registry import FORMATS
from tests.builders import PROMPT, block_network


def test_biases_of_a_target_are_written_with_zeros_where_it_has_none(tmp_path: Path, target: Target) -> None:
    drafter = _biased(target)
    FORMATS["dflash"].write(drafter, tmp_path / "out", torch.float32, "")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert bool((held["layers.0.self_attn.o_proj.bias"] == 0).all())
    reader = FilesReader(tmp_path / "out", stock_model(target))
    assert all(r.same for r in climb(drafter, FORMATS["dflash"].make(drafter), reader, PROMPT))
    with pytest.raises(UserError, match="--format transformers: its layers have no biases"):
        FORMATS["transformers"].make(drafter)


def _biased(target: Target) -> BlockDrafter:
    drafter = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    drafter.config.attention_bias = True
    again = BlockDrafter(drafter.config, target)
    again.load_state_dict(drafter.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    return again
