"""The kind of a drafter's folder, read from its small files without torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from specalign.formats.kinds import (
    DrafterKind,
    is_block,
    kind_of_config,
    kind_of_drafter,
    layout_of,
    made_for,
)

DREAM = {"architectures": ["DreamModel"], "model_type": "Dream"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
DFLASH = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}


@pytest.mark.parametrize(
    ("values", "record", "name", "layout"),
    [
        ({"model_type": "block_drafter", "context": "shared_kv"}, {}, "shared_kv", ""),
        ({"model_type": "block_drafter", "context": "taps"}, {}, "taps", ""),
        ({**DFLASH, "dflash_config": {}}, {}, "taps", "dflash"),
        ({"architectures": ["DFlash2DraftModel"]}, {}, "taps", "dflash"),  # refused later, by name
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 4}, {}, "taps", "dspark"),
        ({**DFLASH, "dflash_config": {"markov_rank": 256}}, {}, "taps", "dspark"),
        ({"speculators_model_type": "dflash"}, {}, "taps", "speculators"),
        ({"model_type": "muse_glimmer_assistant"}, {}, "taps", "transformers"),
        ({"model_type": "mdlm"}, {"block_size": 6}, "ddit", ""),
        ({"model": {"hidden_size": 8}, "tokens": 50257}, {}, "ddit", ""),
        (DREAM, {}, "masked_lm", ""),
        ({"architectures": ["AdaptedMaskedLM"]}, {"block_size": 8}, "masked_lm", ""),
        (LLAMA, {}, "autoregressive", ""),
        (LLAMA, {"kind": "autoregressive", "block_size": 5}, "autoregressive", ""),
    ],
)
def test_a_config_says_its_kind(
    values: dict[str, Any], record: dict[str, Any], name: str, layout: str
) -> None:
    found = kind_of_config(values, record)
    assert found is not None and found.name == name
    assert found.block_size == record.get("block_size")
    assert layout_of(values) == layout and is_block(values) == (found.kind == "block")


def test_folders(tmp_path: Path) -> None:
    assert kind_of_config({}, {}) is None
    assert kind_of_drafter(str(tmp_path)) is None
    assert kind_of_drafter(str(tmp_path / "nowhere")) is None
    assert kind_of_drafter("pretrained/smollm2-135m-block") == DrafterKind("block", "shared_kv")


def test_the_target_that_a_folder_names(tmp_path: Path) -> None:
    """A verifier first, then the record of an export, then the card's base model."""
    assert made_for(tmp_path, {}) == ""
    (tmp_path / "README.md").write_text("---\nbase_model: 'some/card'\n---\n")
    assert made_for(tmp_path, {}) == "some/card"
    (tmp_path / "export.json").write_text(json.dumps({"target": "some/record"}))
    assert made_for(tmp_path, {}) == "some/record"
    named = {"speculators_config": {"verifier": {"name_or_path": "some/verifier"}}}
    assert made_for(tmp_path, named) == "some/verifier"
