"""An export is written whole, in the place of an export or of nothing; its card tells how to serve it."""

import json
from pathlib import Path

import pytest
import torch

from decode.exporting.formats import write_export
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from tests.builders import block_network


@pytest.fixture
def drafter(target: Target) -> BlockDrafter:
    return block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})


def test_a_folder_of_something_else_stays(tmp_path: Path, drafter: BlockDrafter) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="contains 'mine.txt', not written by a dflash export"):
        write_export("dflash", drafter, tmp_path, torch.float32, "")
    out = tmp_path / "out"
    write_export("dflash", drafter, out, torch.float32, "")
    write_export("dflash", drafter, out, torch.bfloat16, "")  # an export is replaced
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(UserError, match="'README.md', not written by a speculators export"):
        write_export("speculators", drafter, out, torch.bfloat16, "")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="contains 'notes.txt'"):
        write_export("dflash", drafter, out, torch.float32, "")
    (out / "notes.txt").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "export.json").write_text('{"results": [1]}')
    with pytest.raises(UserError, match="contains 'export.json'"):
        write_export("dflash", drafter, tmp_path / "other", torch.float32, "")
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_an_interrupted_export_leaves_the_old_one(
    tmp_path: Path, drafter: BlockDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    write_export("dflash", drafter, tmp_path / "out", torch.float32, "old")
    monkeypatch.setattr("specalign.common.files.to_disk", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_export("dflash", drafter, tmp_path / "out", torch.float32, "new")
    assert (tmp_path / "out" / "README.md").read_text().startswith("old")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
