"""From a trained drafter to exported folders and a verdict on each."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.exporting.exports import ExportVerdict, export_drafter
from specalign.common.errors import UserError
from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt
from tests.builders import block_network, saved_taps_drafter
from tests.target_models import asking_target


@pytest.fixture
def drafter(tmp_path: Path, target: Target) -> str:
    card = "---\nlicense: mit\n---\n| expected τ, greedy | 1.5 |\n"
    folder = saved_taps_drafter(tmp_path / "drafter", target)
    Path(folder, "README.md").write_text(card)
    return folder


def export(
    drafter: str, target: Target, folders: dict[str, Path], **options: Any
) -> list[ExportVerdict]:
    options = {"prompts": [Prompt("a", "Why is the sky blue?")], **options}
    return export_drafter(drafter, target, folders, **options)


def test_several_formats_at_once(tmp_path: Path, target: Target, drafter: str) -> None:
    folders = {name: tmp_path / "out" / name for name in ("dflash", "transformers", "speculators")}
    verdicts = export(drafter, target, folders)
    assert [v.format for v in verdicts] == list(folders) and all(v.exit_code == 0 for v in verdicts)
    card = (folders["dflash"] / "README.md").read_text()
    assert "license: mit" in card
    assert "vllm serve debug --dtype float32" in card
    assert verdicts[1].lines[-1].startswith("generate: 1 of 1 outputs equal")


def test_a_folder_given_as_the_target_is_named(tmp_path: Path, target: Target) -> None:
    """It may hold a finetuned model, whatever the drafter was made for; in the hub's cache it has that name."""
    network = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    network.config.target = "some/model"
    save_drafter(network, tmp_path / "drafter")
    cached = tmp_path / "models--org--finetune/snapshots/0"
    for place, name in ((tmp_path / "its", str(tmp_path / "its")), (cached, "org/finetune")):
        folder, out = asking_target(place, target), tmp_path / place.name / "out"
        opened = load_target(folder, "float32", "cpu")
        (verdict,) = export(str(tmp_path / "drafter"), opened, {"speculators": out}, prompts=())
        record = json.loads((out / "export.json").read_text())
        verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
        assert verifier["name_or_path"] == record["target"] == name
        assert "some/model" not in (out / "README.md").read_text() + verdict.serve[0].lines[0]


def test_one_refusal_writes_nothing(tmp_path: Path, target: Target, drafter: str) -> None:
    with pytest.raises(UserError, match="block_layout=anchor_first"):
        export(
            drafter, target, {"dflash": tmp_path / "out" / "a", "dspark": tmp_path / "out" / "b"}
        )
    assert not (tmp_path / "out").exists()
