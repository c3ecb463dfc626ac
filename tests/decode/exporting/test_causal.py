"""An autoregressive drafter's export is its folder, opened by transformers as it is."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from align.common.errors import UserError
from align.models.checkpoints.causal import save_causal
from align.target.model import Target
from decode.exporting import causal
from decode.exporting.causal import export
from tests.builders import PROMPT, causal_drafter


def test_the_folder_is_an_assistant_of_transformers(tmp_path: Path, target: Target) -> None:
    save_causal(causal_drafter(target), tmp_path / "drafter", card="---\nlicense: mit\n---\n")
    verdict = export(str(tmp_path / "drafter"), "debug", {"draft_model": tmp_path / "out"}, "float32")
    assert verdict.same and "draft_model" in verdict.serve[0] and "logits over" in verdict.lines[0]
    (note,), page = verdict.notes, (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in page and note[1:] in page and "'debug', which is no hub id" in note
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("drafter", "out"))
    ids = torch.tensor([PROMPT])
    assert torch.equal(first(ids).logits, second(ids).logits)
    several = {name: tmp_path / "other" / name for name in ("draft_model", "dflash")}
    with pytest.raises(UserError, match="--format dflash: .* use --format draft_model"):
        export(str(tmp_path / "drafter"), "debug", several, "float32")
    assert not (tmp_path / "other").exists()


def test_weights_are_stored_in_the_type_that_is_asked_for(tmp_path: Path, target: Target) -> None:
    save_causal(causal_drafter(target), tmp_path / "drafter")
    (tmp_path / "x 6'q").mkdir()
    for dtype in ("bfloat16", "float16"):
        out = tmp_path / "x 6'q" / dtype
        verdict = export(str(tmp_path / "drafter"), "debug", {"draft_model": out}, dtype)
        assert verdict.same and any(f"rounded to {dtype}" in note for note in verdict.notes)
        held = load_file(out / "model.safetensors").values()
        assert {t.dtype for t in held} == {getattr(torch, dtype)}
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        said = shlex.split(verdict.serve[0])[-1]  # as a shell reads it
        assert json.loads(said)["model"] == str(out)


def test_an_export_of_other_weights_is_named(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_causal(causal_drafter(target), tmp_path / "drafter")
    own = causal.write_weights
    monkeypatch.setattr(causal, "write_weights", lambda t, f: own({k: 2 * v for k, v in t.items()}, f))
    verdict = export(str(tmp_path / "drafter"), "debug", {"draft_model": tmp_path / "out"}, "bfloat16")
    assert not verdict.same and "DIFFERENT" in verdict.lines[0]
