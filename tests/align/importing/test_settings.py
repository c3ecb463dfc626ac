"""A config.json that does not fit is refused in one line that names the key; published defaults hold where a key is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.common.errors import UserError
from align.importing.settings import read_settings
from align.models.checkpoints.block import load_drafter
from align.target.model import Target
from tests.published_blocks import backbone, dflash_config, dspark_config, speculators_config, write


def nested(target: Target, **changes: Any) -> dict[str, Any]:
    config = dflash_config(target)
    return {**config, "dflash_config": {**config["dflash_config"], **changes}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"architectures": ["DFlash2DraftModel"]}, "architectures=.*DFlashDraftModel alone"),
    ("dflash", {"model_type": "laguna"}, "model_type='laguna'"),
    ("dflash", {"hidden_size": 72, "head_dim": 8}, "hidden_size is 72, target 'debug' has 64"),
    ("dflash", {"vocab_size": 999}, "vocab_size is 999, target 'debug' has"),
    ("dflash", {"num_target_layers": 36}, "num_target_layers is 36, target 'debug' has 4"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 9]}}, "target_layer_ids has 9"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 3]}}, "has 3, the target's last layer"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": "0"}}, "target_layer_ids must be"),
    ("dflash", {"dflash_config": {"target_layer_ids": [0, 2]}}, "missing key 'mask_token_id'"),
    ("dflash", {"block_size": None}, "missing key 'block_size'"),
    ("dflash", {"block_size": 1}, "block_size=1 must be at least 2"),
    ("dflash", {"block_size": "5"}, "block_size must be a whole number"),
    ("dflash", {"intermediate_size": None}, "missing key 'intermediate_size'"),
    ("dflash", {"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
    ("dflash", {"hidden_act": "no_such"}, "hidden_act='no_such' is unknown"),
    ("dflash", {"is_causal": True}, "is_causal=true"),
    ("dflash", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, "sliding_attention"),
    ("dflash", {"layer_types": ["linear_attention"] * 2}, "layer_types has 'linear_attention'"),
    ("dflash", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("dflash", {"output_multiplier": 0.5}, "output_multiplier=0.5"),
    ("dflash", {"input_embedding_scale": 8.0}, "input_embedding_scale=8.0"),
    ("dflash", {"projector_type": "domino"}, "projector_type='domino'"),
    ("dflash", {"selector_rank": 256}, "selector_rank=256: DFlash 2"),
    ("dflash", {"attention_mode": "mla"}, "attention_mode='mla'"),
    ("dspark", {"markov_head_type": "lstm"}, "markov_head_type='lstm'"),
    ("dspark", {"markov_rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": True}, "needs markov_rank"),
    ("dspark", {"sample_from_anchor": 1}, "sample_from_anchor must be true or false"),
    ("speculators", {"speculators_model_type": "eagle3"}, "speculators_model_type='eagle3'"),
    ("speculators", {"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids has 0: .* the layers 1 to 4"),
    ("speculators", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids must be a list"),
    ("speculators", {"target_hidden_size": 128}, "target_hidden_size=128"),
    ("speculators", {"transformer_layer_config": "qwen3"}, "transformer_layer_config must be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "changes", "says"), REFUSED)
def test_what_does_not_fit_is_refused_by_its_key(
    tmp_path: Path, target: Target, layout: str, changes: dict[str, Any], says: str
) -> None:
    config = {
        "dflash": dflash_config(target),
        "dspark": dspark_config(target, "vanilla", 4),
        "speculators": speculators_config(target),
    }[layout] | changes
    folder = write(tmp_path / "theirs", config, backbone(target))
    with pytest.raises(UserError, match=says) as refused:
        load_drafter(folder, target)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


def test_defaults_are_the_published_ones(target: Target) -> None:
    """Taps evenly spread, a head's width from the model's, the block's size inside of `dflash_config`."""
    config = nested(target, block_size=7)
    del config["dflash_config"]["target_layer_ids"], config["block_size"], config["head_dim"]
    found = read_settings({**config, "num_hidden_layers": 1}, "dflash", "here", target)
    assert found["target_layer_ids"] == [2] and found["head_dim"] == target.hidden_size // 4
    assert (found["block_size"], found["sample_from_anchor"], found["init_layer_ids"]) == (7, False, [-1])
    many = {**config, "num_target_layers": 36, "num_hidden_layers": 5}
    with pytest.raises(UserError, match="target_layer_ids has 9"):  # [1, 9, 17, 25, 33]
        read_settings(many, "dflash", "here", target)


def test_a_window_that_holds_every_text_is_none(target: Target) -> None:
    kinds = {"layer_types": ["sliding_attention"] * 2, "sliding_window": target.context_limit}
    assert read_settings({**dflash_config(target), **kinds, "is_causal": False}, "dflash", "here", target)
    with pytest.raises(UserError, match="sliding_attention"):  # causal, where nothing else is said
        read_settings({**dflash_config(target), **kinds}, "dflash", "here", target)
