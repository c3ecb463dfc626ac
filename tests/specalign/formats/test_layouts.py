"""A config.json's layout, told from what published folders say, and the target that a folder names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specalign.formats.layouts import is_block, layout_of, made_for


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        (
            {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}},
            "dflash",
        ),
        ({"model_type": "qwen3", "dflash_config": {"target_layer_ids": [1]}}, "dflash"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash"),  # refused later, by name
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, "dspark"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 256}}, "dspark"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}},
            "dspark",
        ),
        (
            {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]},
            "speculators",
        ),
        ({"speculators_model_type": "eagle3"}, "speculators"),
        ({"model_type": "muse_glimmer_assistant"}, "transformers"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, ""),
        ({"architectures": ["TargetConditionedBlockDrafter"], "model_type": "block_drafter"}, ""),
        ({}, ""),
    ],
)
def test_layouts(values: dict[str, Any], layout: str) -> None:
    assert layout_of(values) == layout
    assert is_block(values) == bool(layout or values.get("model_type") == "block_drafter")


def test_the_target_that_a_folder_names(tmp_path: Path) -> None:
    """A verifier first, then the record of an export, then the card's base model."""
    assert made_for(tmp_path, {}) == ""
    (tmp_path / "README.md").write_text("---\nbase_model: 'some/card'\n---\n")
    assert made_for(tmp_path, {}) == "some/card"
    (tmp_path / "export.json").write_text(json.dumps({"target": "some/record"}))
    assert made_for(tmp_path, {}) == "some/record"
    named = {"speculators_config": {"verifier": {"name_or_path": "some/verifier"}}}
    assert made_for(tmp_path, named) == "some/verifier"
