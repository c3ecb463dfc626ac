"""The comparison with vLLM and other peers, small: outputs the same, acceptance the same. Skips without vLLM's environment."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from align.models.checkpoints.block import save_drafter
from align.models.checkpoints.causal import save_causal
from align.target.loading import load_target
from align.target.names import DEFAULT_TARGET
from tests import peers, serve_check, training_peers
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


def test_trainings_side_by_side_are_compared_within_a_repeat() -> None:
    def runs(*seconds: float) -> list[dict[str, Any]]:
        same = {"positions": [30, 50], "before": 100.0, "peak": 200.0, "parameters": 15_820_928}
        return [{**same, "seconds": [s / 4, 3 * s / 4]} for s in seconds]

    rows = training_peers.table({training_peers.OURS: runs(1, 2, 4), "theirs": runs(2, 3, 8)})
    assert rows[2].startswith("| ours | 40 [20, 80] |  | 1.00 [0.50, 2.00] | 40 |")
    assert rows[3].startswith("| theirs | 27 [10, 40] | 2.00 [1.50, 2.00] |")
    assert rows[3].endswith("| 200 [200, 200] | 100 [100, 100] | 15.82M |")
    meter = training_peers.Meter()
    for step in range(training_peers.WARM + 2):
        meter.step(10 * step, 0.5)
    assert meter.positions == [10 * training_peers.WARM, 10 * (training_peers.WARM + 1)]
    assert len(meter.found(7)["seconds"]) == 2 and meter.peak > 0
