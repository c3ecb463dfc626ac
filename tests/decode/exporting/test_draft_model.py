"""An autoregressive drafter's export is its folder, opened by transformers as it is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from decode.exporting.compare import ExportVerdict
from decode.exporting.exports import DrafterPair, ExportOptions, check_transformers, export_drafter
from specalign.common.errors import UserError
from specalign.formats.causal import save_causal
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt
from tests.builders import PROMPT, causal_drafter


def export(folder: Path, dtype: str, out: Path | None = None) -> ExportVerdict:
    """The drafter in `folder`."""
    pair = DrafterPair(str(folder / "drafter"), "autoregressive", "debug", "cpu")
    options = ExportOptions(dtype, limit=1, max_new_tokens=12)
    return export_drafter(pair, {"draft_model": out or folder / "out"}, options)[0]


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
        export_drafter(pair, several, ExportOptions())
    assert not (tmp_path / "other").exists()


def test_later_and_in_one_process(tmp_path: Path, target: Target) -> None:
    """A fresh export, one that was written, one whose second layer or config is another."""
    save_causal(causal_drafter(target), tmp_path / "drafter")
    export(tmp_path, "float32")
    pair, out = (
        DrafterPair(str(tmp_path / "drafter"), "autoregressive", "debug", "cpu"),
        tmp_path / "out",
    )
    prompts: Any = [Prompt("a", "Why is the sky blue?")]
    for folder in (None, out):
        assert check_transformers(pair, prompts, 12, folder).exit_code == 0
    held = load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**held, name: 2 * held[name]}, out / "model.safetensors", {"format": "pt"})
    verdict = check_transformers(pair, prompts, 12, out)
    assert verdict.exit_code == 1 and name in verdict.lines[0]
    with pytest.raises(UserError, match="no export.json, so no export of this project"):
        check_transformers(pair, prompts, 12, tmp_path / "drafter")


def test_a_drafter_that_was_saved_without_its_head_is_told(tmp_path: Path) -> None:
    """The target's head is not its embedding, and the drafter's config says that it is."""
    model, tokenizer = debug_model("Llama")
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    type(model)(config).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    target = load_target(str(tmp_path / "target"), "float32", "cpu")
    drafter = tmp_path / "drafter"
    save_causal(causal_drafter(target), drafter)
    pair = DrafterPair(str(drafter), "autoregressive", target.spec, "cpu")
    options = ExportOptions("float32", limit=1, max_new_tokens=4)
    assert export_drafter(pair, {"draft_model": tmp_path / "a"}, options)[0].exit_code == 0
    held = load_file(drafter / "model.safetensors")
    del held["lm_head.weight"]
    save_file(held, drafter / "model.safetensors", {"format": "pt"})
    values = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    (verdict,) = export_drafter(pair, {"draft_model": tmp_path / "b"}, options)
    assert verdict.exit_code == 1 and "saved without it" in verdict.lines[0]
