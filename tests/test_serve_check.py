"""The comparison with vLLM and other peers, small: outputs the same, acceptance the same. Skips without vLLM's environment."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch

from align.models.checkpoints.block import save_drafter
from align.models.checkpoints.causal import save_causal
from align.target.loading import load_target
from align.target.names import DEFAULT_TARGET
from tests import peers, serve_check
from tests.builders import PROMPT, block_network, causal_drafter, overfit_block_network

VLLM = Path(os.environ.get("VLLM", ".venv-vllm"))


@pytest.mark.slow
def test_engines_in_this_process_side_by_side(tmp_path: Path) -> None:
    target = load_target("debug", "float32", "cpu")
    save_drafter(overfit_block_network(target, PROMPT), tmp_path / "drafter")
    save_causal(causal_drafter(target), tmp_path / "small")
    options = argparse.Namespace(
        target="debug", drafter=str(tmp_path / "drafter"), assistant=tmp_path / "small", vllm=None, suite="builtin", limit=2,
        max_new_tokens=8, out=tmp_path / "out",
    )  # fmt: skip
    found = peers.run(options)
    assert all(same == 2 for same in found["identical_to_ours"].values()), found
    small = {f"{engine} with a small language model" for engine in ("ours", "transformers")}
    assert {"ours", "transformers with a custom_generate export", *small} < found["tokens_per_s"].keys()


@pytest.mark.slow
@pytest.mark.skipif(not (VLLM / "bin" / "python").is_file(), reason="make serve-check sets up vLLM")
def test_vllm_drafts_as_the_decoder_here(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = block_network(
        load_target(DEFAULT_TARGET, "float32"),
        "taps",
        whole=True,
        options={"block_layout": "fill_in", "block_size": 4},
    )
    save_drafter(network, tmp_path / "drafter")
    options = argparse.Namespace(
        vllm=VLLM, drafter=str(tmp_path / "drafter"), target=DEFAULT_TARGET, suite="builtin", limit=1, max_new_tokens=12,
        out=tmp_path / "out", as_it_is=False,
    )  # fmt: skip
    assert serve_check.run(options)["same"]
