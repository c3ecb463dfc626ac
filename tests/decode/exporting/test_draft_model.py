"""An autoregressive drafter's export is its folder, opened by transformers as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from decode.exporting.compare import ExportVerdict
from decode.exporting.exports import DrafterPair, check_export, export_drafter
from specalign.common.errors import UserError
from specalign.formats.causal import save_causal
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt
from tests.builders import PROMPT, causal_drafter

WHY = Prompt("a", "Why is the sky blue?")


def export(folder: Path, dtype: str, out: Path | None = None) -> ExportVerdict:
    """The drafter in `folder`."""
    pair = DrafterPair(str(folder / "drafter"), "autoregressive", "debug", "cpu")
    return export_drafter(pair, {"draft_model": out or folder / "out"}, dtype, [WHY])[0]


def test_the_folder_is_an_assistant_of_transformers(tmp_path: Path, target: Target) -> None:
    save_causal(causal_drafter(target), tmp_path / "drafter", card="---\nlicense: mit\n---\n")
    verdict = export(tmp_path, "float32")
    assert verdict.exit_code == 0 and "draft_model" in verdict.serve[0].lines[0]
    page = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in page and "'debug', which is not a hub id" in page
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("drafter", "out"))
    ids = torch.tensor([PROMPT])
    assert torch.equal(first(ids).logits, second(ids).logits)
    pair = DrafterPair(str(tmp_path / "drafter"), "autoregressive", "debug", "cpu")
    several = {name: tmp_path / "other" / name for name in ("draft_model", "dflash")}
    with pytest.raises(UserError, match="--format dflash: .* fits --format draft_model"):
        export_drafter(pair, several)
    assert not (tmp_path / "other").exists()


def test_later_and_in_one_process(tmp_path: Path, target: Target) -> None:
    """An export, and one whose second layer is another."""
    save_causal(causal_drafter(target), tmp_path / "drafter")
    export(tmp_path, "float32")
    pair, out = (
        DrafterPair(str(tmp_path / "drafter"), "autoregressive", "debug", "cpu"),
        tmp_path / "out",
    )
    assert check_export(pair, out, [WHY], 12).exit_code == 0
    held = load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**held, name: 2 * held[name]}, out / "model.safetensors", {"format": "pt"})
    verdict = check_export(pair, out, [WHY], 12)
    assert verdict.exit_code == 1 and name in verdict.lines[0]
    with pytest.raises(UserError, match="no export.json, so no export of this project"):
        check_export(pair, tmp_path / "drafter", [WHY], 12)
