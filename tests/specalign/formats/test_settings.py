"""A config.json that does not fit is refused in one line that names the key; published defaults hold where a key is left out."""

from pathlib import Path
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.formats.block import READERS, load_drafter
from specalign.formats.kinds import layout_of
from specalign.formats.published import ConfigReader
from specalign.lm.model import Target
from tests.published_blocks import (
    ROWS,
    backbone,
    dflash_config,
    dspark_config,
    speculators_config,
    write,
)


def read_settings(config: dict[str, Any], layout: str, target: Target) -> dict[str, Any]:
    return READERS[layout](ConfigReader(config), target)


def nested(target: Target, **changes: Any) -> dict[str, Any]:
    config = dflash_config(target)
    return {**config, "dflash_config": {**config["dflash_config"], **changes}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"model_type": "laguna"}, "model_type='laguna'"),
    ("dflash", {"hidden_size": 72, "head_dim": 8}, "hidden_size is 72, target 'debug' has 64"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 9]}}, "target_layer_ids has 9"),
    ("dflash", {"dflash_config": {"target_layer_ids": [0, 2]}}, "missing key 'mask_token_id'"),
    ("dflash", {"block_size": None}, "missing key 'block_size'"),
    ("dflash", {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ("dflash", {"is_causal": False, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2], "causal": True}}, " causal=True"),
    ("dflash", {"rope_is_neox_style": False}, "rope_is_neox_style=False is not supported; must be True"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "attention_value_scale": 0.707}}, "attention_value_scale=0.707"),
    ("dflash", {"shift_label": True}, "shift_label=true needs"),
    ("dflash", {"projector_type": "domino"}, "projector_type='domino'"),
    ("dspark", {"markov_head_type": "lstm"}, "markov_head_type='lstm'"),
    ("dspark", {"markov_rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": True}, "needs markov_rank"),
    ("speculators", {"speculators_model_type": "eagle3"}, "speculators_model_type='eagle3'"),
    ("speculators", {"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids has 0: only layers 1 to 3"),
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
    found = read_settings({**config, "num_hidden_layers": 1}, "dflash", target)
    assert found["target_layer_ids"] == [2] and found["head_dim"] == target.hidden_size // 4
    assert (found["block_size"], found["sample_from_anchor"]) == (7, False)
    assert found["init_layer_ids"] == [-1]
    many = {**config, "num_target_layers": 36, "num_hidden_layers": 5}
    with pytest.raises(UserError, match="target_layer_ids has 9"):  # [1, 9, 17, 25, 33]
        read_settings(many, "dflash", target)


def test_a_window_that_holds_every_text_is_none(target: Target) -> None:
    kinds = {"layer_types": ["sliding_attention"] * 2, "sliding_window": target.context_limit}
    assert read_settings({**dflash_config(target), **kinds, "is_causal": False}, "dflash", target)
    with pytest.raises(UserError, match="sliding_attention"):  # causal, where nothing else is said
        read_settings({**dflash_config(target), **kinds}, "dflash", target)


@pytest.mark.parametrize(
    ("kind", "tokens", "said", "wanted"),
    [
        ("dspark", None, None, False),  # before there was the key: the first row is the anchor's
        ("dspark", ROWS, None, True),
        ("dspark", None, True, True),
        ("dflash", None, None, False),
    ],
)
def test_the_anchors_row_in_speculators_folders(
    target: Target, kind: str, tokens: int | None, said: bool | None, wanted: bool
) -> None:
    config = speculators_config(target, kind, sample_from_anchor=said)
    if tokens is not None:
        config["speculators_config"]["proposal_methods"] = [{"speculative_tokens": tokens}]
    assert read_settings(config, "speculators", target)["sample_from_anchor"] is wanted


# Heads of config.json as they lie on the hub or in their trainers' own recipes, small: what each says beside the sizes.
REAL: dict[str, tuple[str, dict[str, Any], str]] = {
    "z-lab/Qwen3-4B-DFlash-b16": ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]}}, ""),
    "z-lab/Qwen3.6-35B-A3B-DFlash": (  # all of it inside
        "dflash", {"block_size": None, "use_sliding_window": True, "sliding_window": 4096,
                   "dflash_config": {"block_size": 5, "mask_token_id": 3, "target_layer_ids": [0, 2]}}, ""),
    "DFlash 2": (
        "dflash", {"architectures": ["DFlash2DraftModel"], "is_causal": False,
                   "dflash_config": {"block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 3}}, "architectures="),
    "a fork's Qwen3.6-27B DSpark under DFlash's name": (  # with fields of its target's config
        "dspark", {"architectures": ["DFlashDraftModel"], "attn_output_gate": True, "full_attention_interval": 4, "num_anchors": 64,
                   "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
                   "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2], "markov_rank": 4}}, ""),
    "satgeze/Qwen3.6-27B-DSpark": (  # its target's share of a head that is turned, which layers of its own don't heed
        "dspark", {"partial_rotary_factor": 0.25, "rope_parameters": {
            "rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}}, ""),
    "RadixArk/Qwen3.8-27B-DSpark": (
        "dspark", {"architectures": ["DSparkDraftModel"], "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 1e7,
            "rope_type": "yarn"}, "dflash_config": {
                "attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": False, "mask_token_id": 3,
                "projector_type": "dspark", "target_layer_ids": [0, 2]}}, ""),
    "SpecForge's qwen3-8b-dspark": (
        "dspark", {"architectures": ["DSparkDraftModel"], "mask_token_id": None, "target_layer_ids": None, "dflash_config": {
            "mask_token_id": 3, "target_layer_ids": [0, 2], "projector_type": "dspark", "markov_rank": 4,
            "markov_head_type": "vanilla", "confidence_head_alpha": 1.0}}, ""),
    "LiquidAI/LFM2.5-2.6B-DSpark": (
        "dspark", {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}, "architectures="),
    "DaoCloud/Muse-Glimmer-30B-DSpark": (
        "speculators", {"speculators_model_type": "dspark", "sample_from_anchor": True, "sliding_window_non_causal": False,
                        "layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, "sliding_attention"),
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": (
        "speculators", {"speculators_model_type": "dspark", "markov_rank": 4, "markov_head_type": "vanilla", "speculators_config": {
            "algorithm": "dspark", "proposal_methods": [{"speculative_tokens": ROWS}], "verifier": {"name_or_path": "x"}}}, ""),
    "transformers' own assistant": (
        "transformers", {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
                         "layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "mask_token_id": 3,
                         "target_layer_ids": [0, 2]}, "sliding_attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_configs_as_they_are_published(target: Target, name: str) -> None:
    """Each key that one of them uses is known, or refused by its name."""
    layout, changes, says = REAL[name]
    base = {
        "dflash": dflash_config(target), "dspark": dspark_config(target, "vanilla", 4),
        "speculators": speculators_config(target), "transformers": dflash_config(target, dflash_config=None),
    }[layout]  # fmt: skip
    config = {**base, **changes}
    assert layout_of(config) == layout
    if says:
        with pytest.raises(UserError, match=says):
            read_settings(config, layout, target)
    else:
        found = read_settings(config, layout, target)
        assert (found["target_layer_ids"], found["block_size"]) == ([0, 2], ROWS)
        assert found["head_dim"] == 8
        assert found["sample_from_anchor"] is ("DSpark" in name or "dspark" in name)
