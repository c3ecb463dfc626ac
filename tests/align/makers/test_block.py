"""A block drafter made for a target: its starting weights, its taps, what is added to a trained one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from align.config.drafter import DrafterConfig
from align.config.parser import load_recipe
from align.config.recipe_files import list_recipes
from align.data import shards as data
from align.makers.block import asked_markov, from_target, make_block
from align.makers.geometry import tap_layers
from align.planning.drafter_sizes import plan_drafter_sizes
from align.planning.target_sizes import read_target_sizes
from specalign.common.errors import UserError
from specalign.formats.block import load_drafter, save_drafter
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from tests.builders import block_options as options
from tests.builders import needed_words, trained_block
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


def test_taps_have_the_published_names(target: Target) -> None:
    names = {
        n
        for n, _ in from_target(target, options(context="taps", layers=1), None).named_parameters()
    }
    attention = {
        f"self_attn.{p}.weight"
        for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    rest = {f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert names == {f"layers.0.{n}" for n in attention | rest | norms} | {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
    }
    assert tap_layers(36, 5) == [1, 9, 17, 25, 33] and tap_layers(30, 5) == [1, 8, 14, 20, 27]


def test_what_is_asked_for_is_added_to_a_trained_drafter(
    target: Target, samples: data.Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not asked for stays as it was saved; so does a Markov head of the kind and rank asked for."""
    save_drafter(trained_block(target, samples, markov_rank=8), tmp_path, dtype=torch.float32)
    own = load_drafter(tmp_path, target)

    def start(**changes: Any) -> tuple[BlockDrafter, set[str]]:
        made = make_block(target, options(init=str(tmp_path), markov_rank=8, **changes), None)
        mine = dict(made.named_parameters())
        return made, {n for n, p in own.named_parameters() if n in mine and torch.equal(p, mine[n])}

    names = {name for name, _ in own.named_parameters()}
    for changes in ({}, {"markov": "mixed"}, {"markov": "silu"}, {"convolution": True}):
        made, kept = start(**changes)
        assert kept == names and made.config.convolution == bool(changes.get("convolution"))
    assert "fresh" not in capsys.readouterr().err
    made, kept = start(markov="mlp", markov_width=12, convolution=True)
    assert kept == {n for n in names if not n.startswith("markov.")}
    assert (made.config.markov, made.config.markov_width, made.config.markov_rank) == ("mlp", 12, 8)
    assert "its Markov head (silu, rank 8) is replaced by a fresh one" in capsys.readouterr().err
    save_drafter(made, tmp_path / "again", dtype=torch.float32)
    neither = options(init=str(tmp_path / "again"), markov_rank=DrafterConfig().markov_rank)
    assert make_block(target, neither, None).config == made.config


@pytest.mark.parametrize(
    ("own", "asked", "kind", "rank", "said"),
    [
        ({"markov_rank": 8, "markov": "tanh"}, {"markov_rank": 4}, "tanh", 4, "(tanh, rank 8) is replaced by a fresh one (tanh, rank 4)"),
        ({"markov_rank": 8}, {"markov_rank": 0}, "", 0, "(silu, rank 8) is removed"),
        ({}, {"markov_rank": 4}, "silu", 4, "has no Markov head and gets a fresh one (silu, rank 4)"),
        ({}, {"markov_rank": 0}, "", 0, ""),
        ({"markov_rank": 8, "markov": "mlp", "markov_width": 6}, {"markov_rank": 8}, "mlp", 8, ""),
    ],
)  # fmt: skip
def test_a_rank_that_is_asked_for_is_had(
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    own: dict[str, Any],
    asked: dict[str, Any],
    kind: str,
    rank: int,
    said: str,
) -> None:
    """Whether or not the recipe names a kind; a plan counts the same parameters."""
    save_drafter(from_target(target, options(**own), torch.arange(4, 68)), tmp_path)
    words = options(init=str(tmp_path), **asked)
    made = make_block(target, words, None)
    assert (made.config.markov_kind, made.config.markov_rank) == (kind, rank) and (
        made.markov is None
    ) == (rank == 0)
    assert said in (err := capsys.readouterr().err) and bool(err) == bool(said), err
    save_drafter(made, tmp_path / "again")
    assert load_drafter(tmp_path / "again", target).config == made.config
    recipe = load_recipe(["recipe=debug_block"])
    recipe.drafter = words
    assert plan_drafter_sizes(recipe, read_target_sizes("debug")).parameters == sum(
        p.numel() for p in made.parameters()
    )


def test_what_an_init_keeps_though_the_recipe_asks_otherwise_is_said(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for context in ("taps", "shared_kv"):
        own = {
            "context": context,
            "block_size": 3,
            "layers": 1,
            "target_layers": [3],
            "mask_token_id": 5,
        }
        drafter = from_target(target, options(**own), torch.arange(4, 68))
        save_drafter(drafter, init := tmp_path / context)
        for same in ({}, {**own, "draft_vocab": 64}, {"target_layers": [-1], "layers": 1}):
            make_block(target, options(init=str(init), **{"taps": 5, **same}), None)
            assert capsys.readouterr().err == ""
        other = {
            "block_size": 8,
            "layers": 4,
            "draft_vocab": 0,
            "target_layers": [-4, 1],
            "mask_token_id": 7,
        }
        made = make_block(target, options(init=str(init), context="taps", **other), None)
        assert made.config == replace(drafter.config, extra=made.config.extra)
        own_first, other_first = (
            ("context=shared_kv, ", "context=taps, ") if context == "shared_kv" else ("", "")
        )
        assert capsys.readouterr().err == (
            f"note: drafter.init={init} keeps its own {own_first}block_size=3, layers=1, target_layers=[3], draft_vocab=64, "
            f"mask_token_id=5; the recipe asks for {other_first}block_size=8, layers=4, target_layers=[0, 1], draft_vocab=0, "
            "mask_token_id=7\n"
        )
    make_block(target, options(init=str(tmp_path / "taps"), taps=3), None)
    assert "keeps its own taps=1; the recipe asks for taps=3\n" in capsys.readouterr().err


def test_shipped_recipes_keep_the_markov_head_that_they_start_from(target: Target) -> None:
    config = from_target(target, options(), None).config
    for name in list_recipes():
        asked = load_recipe([f"recipe={name}", *needed_words(name)]).drafter
        if asked.kind == "block" and asked.init is not None:
            maker = Path(asked.init).parent.name  # runs/NAME/drafter, or the shipped drafter
            words = [f"recipe={maker}", *needed_words(maker)]
            rank = load_recipe(words).drafter.markov_rank if maker in list_recipes() else 192
            assert asked_markov(replace(config, markov_rank=rank), asked)[1] == rank, name


def test_a_layout_is_that_of_the_drafter_to_start_from(
    target: Target, samples: data.Samples, tmp_path: Path
) -> None:
    save_drafter(trained_block(target, samples, block_layout="fill_in"), tmp_path)
    for asked in (None, "fill_in"):
        made = make_block(target, options(init=str(tmp_path), block_layout=asked), None)
        assert (made.config.block_layout, made.config.block_size) == ("fill_in", 4)
    with pytest.raises(
        UserError,
        match=r"drafter.block_layout=anchor_first: .* was trained in fill_in; leave it out",
    ):
        make_block(target, options(init=str(tmp_path), block_layout="anchor_first"), None)


def test_a_target_whose_embedding_is_narrower_has_no_block_drafter() -> None:
    narrow = tiny_target("opt", word_embed_proj_dim=32, do_layer_norm_before=False)
    with pytest.raises(
        UserError,
        match="has embeddings of width 32 and layers of width 64 .drafter.kind=autoregressive",
    ):
        from_target(narrow, options(context="taps", layers=1), None)


@pytest.mark.parametrize("context", ["taps", "shared_kv"])
def test_biases_are_the_targets_unless_asked_otherwise(target: Target, context: str) -> None:
    """Without them its layers start from the target's weights as before."""
    biased = tiny_target("qwen2")
    for given, asked, there in (
        (biased, None, True),
        (biased, False, False),
        (target, None, False),
    ):
        made = from_target(given, options(context=context, layers=1, attention_bias=asked), None)
        names = {name for name, _ in made.named_parameters() if name.endswith("q_proj.bias")}
        assert bool(names) is made.config.attention_bias is there
        own, index = made.layers[0].self_attn.q_proj.weight, made.config.init_layer_ids[0]
        assert torch.equal(own, given.layers[index].self_attn.q_proj.weight)
