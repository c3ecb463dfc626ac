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
from decode.exporting.content import rope_parameters
from decode.exporting.ladder import climb
from decode.exporting.reader import FilesReader
from decode.exporting.registry import FORMATS
from decode.exporting.serving import ServedTarget
from tests.builders import PROMPT, block_network


def test_biases_of_a_target_are_written_with_zeros_where_it_has_none(tmp_path: Path, target: Target) -> None:
    drafter = _biased(target)
    FORMATS["dflash"].write(drafter, tmp_path / "out", torch.float32, "")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert bool((held["layers.0.self_attn.o_proj.bias"] == 0).all())
    reader = FilesReader(tmp_path / "out", stock_model(target))
    assert all(r.same for r in climb(drafter, FORMATS["dflash"].make(drafter), reader, PROMPT))
    with pytest.raises(
        UserError, match="the format's attention has no biases.* train with drafter.attention_bias=false"
    ):
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


def test_places_of_images_are_left_out(target: Target) -> None:
    """In text they are one, and vLLM serves no drafter whose config has them."""
    drafter = block_network(target, "taps")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    target.config.rope_parameters, before = rope, target.config.rope_parameters
    try:
        assert rope_parameters(drafter, "dflash") == {"rope_type": "default", "rope_theta": 1e4}
    finally:
        target.config.rope_parameters = before


def test_two_tables_are_of_no_vllm_drafter(target: Target) -> None:
    """Its other formats and lines stay."""
    drafter = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    served = ServedTarget("T")
    assert any(s.engine == "vLLM" for s in FORMATS["dflash"].snippets(drafter, served, "F"))
    target.config.rope_parameters, before = {"rope_type": "longrope"}, target.config.rope_parameters
    try:
        left = FORMATS["dflash"].snippets(drafter, served, "F")
        assert left and not any("vllm" in line for snippet in left for line in snippet.lines)
        assert any("longrope" in note for note in FORMATS["dflash"].make(drafter).notes)
        assert FORMATS["speculators"].snippets(drafter, served, "F") == []
    finally:
        target.config.rope_parameters = before
