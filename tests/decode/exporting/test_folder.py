"""An export is written whole, in the place of an export or of nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from align.common.errors import UserError
from align.target.model import Target
from decode.exporting.folder import write_block
from tests.builders import block_network


def test_a_folder_of_something_else_stays(tmp_path: Path, target: Target) -> None:
    drafter = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files that no export wrote"):
        write_block(drafter, "dflash", tmp_path, torch.float32, "")
    write_block(drafter, "dflash", tmp_path / "out", torch.float32, "")
    write_block(drafter, "dflash", tmp_path / "out", torch.bfloat16, "")  # an export gives way to a new one
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
