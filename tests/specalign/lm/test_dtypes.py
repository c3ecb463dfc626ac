"""Which type of numbers a target is loaded in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from specalign.kernels.linear import rows_library
from specalign.lm import dtypes
from specalign.lm.loading import load_target

CPU = torch.device("cpu")


def config(dtype: object, **more: object) -> SimpleNamespace:
    made = SimpleNamespace(dtype=dtype, **more)
    made.get_text_config = lambda decoder: made
    return made


@pytest.mark.parametrize(
    ("stored", "parameters", "memory", "fp32"),
    [
        (torch.bfloat16, 1000, 10_000, True),
        (torch.bfloat16, 1000, 7_000, False),  # in fp32 it would fill more than half of the memory
        (torch.float32, 1000, 10_000, False),
        (torch.float32, 100, None, True),
    ],
)
def test_fp32_decodes_faster(
    stored: object, parameters: int, memory: int | None, fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "SMALL", 100)
    monkeypatch.setattr(dtypes, "memory_bytes", lambda: memory)
    monkeypatch.setattr(dtypes, "rows_library", object)

    def empty() -> nn.Module:
        return nn.Linear(parameters // 10, 10, bias=False)

    assert dtypes.decodes_faster_in_fp32(config(stored), empty, CPU) is fp32

    def experts() -> nn.Module:
        """Three quarters of them."""
        model = nn.Linear(parameters // 40, 10, bias=False)
        model.experts = nn.Parameter(torch.empty(3 * parameters // 4))
        return model

    assert dtypes.decodes_faster_in_fp32(config(stored), experts, CPU) is (parameters == 100)
    assert not dtypes.decodes_faster_in_fp32(
        config(stored, quantization_config={"bits": 4}), empty, CPU
    )


@pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")
def test_decoding_takes_fp32_and_training_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "has_fast_bf16", lambda device: True)
    debug = load_target("debug", dtype="bfloat16", fast=False)
    debug.model.save_pretrained(tmp_path)
    debug.tokenizer.save_pretrained(tmp_path)
    found = load_target(str(tmp_path), decoding=True)
    assert found.dtype_name == "float32"
    assert found.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16  # as much is read as in bf16
    assert load_target(str(tmp_path)).dtype_name == "bfloat16"
    assert load_target(str(tmp_path), "bfloat16", decoding=True).dtype_name == "bfloat16"
