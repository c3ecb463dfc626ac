"""Readers refuse what they can't read in one line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from align.common.errors import UserError
from align.target.model import Target
from decode.exporting.folder import write_block
from decode.exporting.ladder import stock_model
from decode.exporting.reader import FilesReader, package
from tests.builders import PROMPT, block_network


def test_files_that_are_not_whole(tmp_path: Path, target: Target) -> None:
    drafter, model = (
        block_network(target, "taps", whole=True, options={"block_layout": "fill_in"}),
        stock_model(target),
    )
    out = tmp_path / "out"
    write_block(drafter, "dflash", out, torch.float32, "")
    config = json.loads((out / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 99]
    (out / "config.json").write_text(json.dumps(config))
    reader = FilesReader(out, model)
    with pytest.raises(UserError, match="layer 99 is none of the target's"):
        reader.drafts(reader.states(PROMPT), 1)
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(UserError, match="model.safetensors: not readable"):
        FilesReader(out, model)


@pytest.mark.skipif(importlib.util.find_spec("dflash") is not None, reason="the package is installed")
def test_a_package_that_is_not_installed_says_what_to_type() -> None:
    with pytest.raises(UserError, match="pip install dflash"):
        package()
