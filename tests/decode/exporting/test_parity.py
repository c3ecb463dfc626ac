"""From a trained drafter to exported folders and a verdict on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.models.checkpoints.block import save_drafter
from align.target.model import Target
from decode.exporting.parity import exported
from tests.builders import block_network


@pytest.fixture
def drafter(tmp_path: Path, target: Target) -> str:
    network = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    card = "---\nlicense: mit\n---\n| expected τ, greedy | 1.5 |\n"
    save_drafter(network, tmp_path / "drafter", card=card)
    return str(tmp_path / "drafter")


def test_several_formats_at_once_are_compared_with_the_drafter(tmp_path: Path, drafter: str) -> None:
    names = ("dflash", "transformers", "speculators")
    folders = {name: tmp_path / "out" / name for name in names}
    verdicts = exported(drafter, "block", "debug", folders, device="cpu", limit=1, max_new_tokens=8)
    assert [v.format for v in verdicts] == list(names) and all(v.same and v.lines for v in verdicts)
    card = (folders["dflash"] / "README.md").read_text()
    assert "license: mit" in card and "| expected τ, greedy | 1.5 |" in card
    assert "vllm serve debug --speculative-config" in card
    assert any("generate(assistant_model=" in line for line in verdicts[1].lines)


def test_nothing_is_written_where_one_format_refuses(tmp_path: Path, drafter: str) -> None:
    folders = {"dflash": tmp_path / "out" / "dflash", "dspark": tmp_path / "out" / "dspark"}
    with pytest.raises(UserError, match="block_layout=anchor_first"):
        exported(drafter, "block", "debug", folders, device="cpu", limit=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("role", "name", "says"),
    [
        ("diffusion", "dflash", "of no engine's format"),
        ("block", "draft_model", "drafter.kind=autoregressive"),
    ],
)
def test_kinds_that_no_format_holds(tmp_path: Path, drafter: str, role: str, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        exported(drafter, role, "debug", {name: tmp_path / "out"}, device="cpu", limit=0)
