"""A saved autoregressive drafter is an ordinary causal LM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from align.models.checkpoints.causal import save_causal
from align.target.loading import load_target
from align.target.model import Target
from tests.builders import causal_drafter as drafter


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


def test_the_folder_is_an_ordinary_causal_lm(target: Target, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = drafter(target)
    save_causal(made, tmp_path, card="# card")
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, target.embedding_VD)
    weights = model.state_dict()
    for name, weight in made.named_parameters():
        assert torch.equal(weights[name.removeprefix("model.")], weight), name
    assert model.generation_config.eos_token_id == target.model.generation_config.eos_token_id
    text = "Say a word."
    own = AutoTokenizer.from_pretrained(str(tmp_path))
    assert own(text)["input_ids"] == target.tokenizer(text)["input_ids"]
    assert load_target(str(tmp_path), "float32", "cpu").chat_tokens(text) == target.chat_tokens(text)
    record = json.loads((tmp_path / "drafter.json").read_text())
    assert record["kind"] == "autoregressive" and record["block_size"] == 3 and record["layers"] == [0, 3]
