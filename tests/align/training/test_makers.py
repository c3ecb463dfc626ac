"""A drafter made for a target: its starting weights, its taps, its mask."""

from __future__ import annotations

import torch

from align.data import shards as data
from align.target.model import Target
from align.training.makers import from_target, mask_token, tap_layers
from tests.builders import block_options as options


def test_starting_weights_are_the_targets(target: Target, samples: data.Samples) -> None:
    drafter = from_target(target, options(layers=2), None)
    assert drafter.config.init_layer_ids == [0, 3] and drafter.draft_size == target.vocab_size
    mine, theirs = drafter.layers[1].mlp.up_proj.weight, target.layers[3].mlp.up_proj.weight
    assert torch.equal(mine, theirs)
    fresh = from_target(target, options(init_from_target=False), None)
    assert not torch.equal(fresh.layers[1].mlp.up_proj.weight, theirs)
    again = from_target(target, options(init_from_target=False), None)
    assert torch.equal(fresh.fc.weight, again.fc.weight)


def test_taps_have_the_published_names(target: Target) -> None:
    names = {n for n, _ in from_target(target, options(context="taps", layers=1), None).named_parameters()}
    attention = {
        f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    rest = {f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert names == {f"layers.0.{n}" for n in attention | rest | norms} | {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
    }
    assert tap_layers(36, 5) == [1, 9, 17, 25, 33] and tap_layers(30, 5) == [1, 8, 14, 20, 27]


def test_mask_token_is_unused(target: Target) -> None:
    assert target.tokenizer.convert_ids_to_tokens(mask_token(target)) in ("<unused>", "<|endoftext|>")
