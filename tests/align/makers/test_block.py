"""A block drafter made for a target: its starting weights, its taps, what is added to a trained one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.makers.block import from_target, make_block
from align.planning.drafter_sizes import plan_drafter_sizes
from align.planning.target_sizes import read_target_sizes
from specalign.common.errors import UserError
from specalign.formats.block import save_drafter
from specalign.lm.model import Target
from specalign.rows import shards as data
from tests.builders import block_options as options
from tests.builders import trained_block
from tests.target_models import tiny_target


def test_starting_weights_are_the_targets(target: Target, samples: data.Samples) -> None:
    drafter = from_target(target, options(layers=2), None)
    assert drafter.config.init_layer_ids == [0, 3] and drafter.draft_size == target.vocab_size
    mine, theirs = drafter.layers[1].mlp.up_proj.weight, target.layers[3].mlp.up_proj.weight
    assert torch.equal(mine, theirs)
    fresh = from_target(target, options(init_from_target=False), None)
    assert not torch.equal(fresh.layers[1].mlp.up_proj.weight, theirs)
    again = from_target(target, options(init_from_target=False), None)
    assert torch.equal(fresh.fc.weight, again.fc.weight)


def test_convolutions_change_no_other_weight(target: Target) -> None:
    """They start as the identity."""
    state = from_target(target, options(markov_rank=8, convolution=True), None).state_dict()
    without = from_target(target, options(markov_rank=8), None).state_dict()
    assert all(torch.equal(state[name], value) for name, value in without.items())
    assert not any(value.any() for name, value in state.items() if "_conv." in name)


def test_what_a_trained_drafter_keeps_and_gets(
    target: Target, samples: data.Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its shape stays, and a line names each option; a confidence head is added; a plan counts the same."""
    own = trained_block(target, samples, markov_rank=8, block_layout="fill_in", block_size=3)
    save_drafter(own, tmp_path, dtype=torch.float32)
    same = make_block(target, options(init=str(tmp_path), markov_rank=192), None)
    assert same.config == own.config and capsys.readouterr().err == ""
    more = {"block_size": 8, "layers": 4, "markov_rank": 4, "convolution": True}
    asked = options(init=str(tmp_path), confidence_head=True, **more)
    made = make_block(target, asked, None)
    kept = {"block_size": (3, 8), "markov_rank": (8, 4), "convolution": (False, True)}
    kept["layers"] = (2, 4)
    start = f"note: drafter.init={tmp_path} has"
    lines = [f"{start} {k}={has}; ignoring {k}={wants}" for k, (has, wants) in kept.items()]
    assert capsys.readouterr().err.splitlines() == lines
    assert made.config == replace(own.config, confidence_head=True)
    mine = dict(made.named_parameters())
    assert all(torch.equal(p, mine[name]) for name, p in own.named_parameters())
    recipe = load_recipe(["recipe=debug_block"])
    recipe.drafter = asked
    planned = plan_drafter_sizes(recipe, read_target_sizes("debug")).parameters
    assert planned == sum(p.numel() for p in made.parameters())
    save_drafter(made, tmp_path / "again")
    make_block(target, options(init=str(tmp_path / "again")), None)
    assert "dropping its confidence head" in capsys.readouterr().err
    with pytest.raises(UserError, match="block_layout=anchor_first: .* was trained with fill_in"):
        make_block(target, options(init=str(tmp_path), block_layout="anchor_first"), None)


def test_a_target_whose_embedding_is_narrower_has_no_block_drafter() -> None:
    narrow = tiny_target("opt", word_embed_proj_dim=32, do_layer_norm_before=False)
    says = "embeddings of width 32 and layers of width 64; use drafter.kind"
    with pytest.raises(UserError, match=says):
        from_target(narrow, options(context="taps", layers=1), None)


@pytest.mark.parametrize("context", ["taps", "shared_kv"])
def test_biases_are_the_targets(target: Target, context: str) -> None:
    for given, there in ((tiny_target("qwen2"), True), (target, False)):
        made = from_target(given, options(context=context, layers=1), None)
        names = {name for name, _ in made.named_parameters() if name.endswith("q_proj.bias")}
        assert bool(names) is made.config.attention_bias is there
        own, index = made.layers[0].self_attn.q_proj.weight, made.config.init_layer_ids[0]
        assert torch.equal(own, given.layers[index].self_attn.q_proj.weight)
