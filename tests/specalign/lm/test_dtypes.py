"""Which type of numbers a target is loaded in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specalign.kernels.linear import rows_library
from specalign.lm import dtypes
from specalign.lm.loading import load_target


@pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")
def test_decoding_is_fp32_training_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "has_fast_bf16", lambda device: True)
    debug = load_target("debug", dtype="bfloat16", fast=False)
    debug.model.save_pretrained(tmp_path)
    debug.tokenizer.save_pretrained(tmp_path)
    found = load_target(str(tmp_path), decoding=True)
    assert found.dtype_name == "float32"
    assert found.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16  # as much is read as in bf16
    assert load_target(str(tmp_path)).dtype_name == "bfloat16"
    assert load_target(str(tmp_path), "bfloat16", decoding=True).dtype_name == "bfloat16"
