"""The comparison with vLLM, small: same outputs, same acceptance. Skips without vLLM's environment."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch

from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target
from specalign.lm.names import DEFAULT_TARGET
from tests import serve_check
from tests.builders import block_network

VLLM = Path(os.environ.get("VLLM", ".venv-vllm"))


@pytest.mark.slow
@pytest.mark.skipif(not (VLLM / "bin" / "python").is_file(), reason="make serve-check sets up vLLM")
def test_vllm_drafts_as_the_decoder_here(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"block_layout": "fill_in", "block_size": 4}
    target = load_target(DEFAULT_TARGET, "float32")
    network = block_network(target, "taps", whole=True, options=options)
    save_drafter(network, tmp_path / "drafter")
    words = argparse.Namespace(
        vllm=VLLM, drafter=str(tmp_path / "drafter"), target=DEFAULT_TARGET, suite="builtin", limit=1,
        max_new_tokens=12, out=tmp_path / "out",
    )  # fmt: skip
    serve_check.check(words)
