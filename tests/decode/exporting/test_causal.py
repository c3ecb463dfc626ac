"""An autoregressive drafter's export is its folder, opened by transformers as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from align.common.errors import UserError
from align.models.checkpoints.causal import save_causal
from align.target.model import Target
from decode.exporting.causal import export
from tests.builders import PROMPT, causal_drafter


def test_the_folder_is_an_assistant_of_transformers(tmp_path: Path, target: Target) -> None:
    save_causal(causal_drafter(target), tmp_path / "drafter", card="---\nlicense: mit\n---\n")
    verdict = export(str(tmp_path / "drafter"), "debug", "draft_model", tmp_path / "out")
    assert verdict.same and "draft_model" in verdict.serve[0]
    (note,), page = verdict.notes, (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in page and note[1:] in page and "'debug', which is no hub id" in note
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("drafter", "out"))
    ids = torch.tensor([PROMPT])
    assert torch.equal(first(ids).logits, second(ids).logits)
    with pytest.raises(UserError, match="use --format draft_model"):
        export(str(tmp_path / "drafter"), "debug", "dflash", tmp_path / "other")
