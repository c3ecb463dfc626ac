"""The block drafter: what is trained is what drafts, for both contexts; folders round-trip; bad folders say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.common.batch import Anchors
from align.common.errors import UserError
from align.data import packing
from align.data import shards as data
from align.diffusion.noise import sample_anchors
from align.models.block import BlockDrafter, BlockSession, target_features
from align.models.block_checkpoint import load_drafter, save_drafter
from align.target.model import Target
from align.training.makers import from_target, mask_token, tap_layers
from tests.builders import TRAINED_BLOCKS as VARIANTS
from tests.builders import block_options as options
from tests.builders import trained_block as build


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_graph_equals_drafting(
    target: Target, samples: data.Samples, variant: dict[str, Any]
) -> None:
    """Same hidden states, position by position, from packed rows and from the decoder's session and cache."""
    drafter = build(target, samples, **variant)
    batch = packing.collate(packing.pack(samples, 64, seed=0))
    anchors = sample_anchors(batch, 12, 4, torch.Generator().manual_seed(2))
    hidden = drafter(batch, target_features(target, batch, drafter.config), anchors)
    checked = 0
    for b in range(batch.tokens_BL.shape[0]):
        for a, place in enumerate(anchors.index_BA[b].tolist()):
            if not anchors.valid_BAK[b, a, 0]:
                continue
            own = batch.document_BL[b] == batch.document_BL[b, place]
            text = batch.tokens_BL[b][own & (torch.arange(64) <= place)]
            cache = target.new_cache(1, 64)
            session = BlockSession(drafter, cache, 64)
            cut = len(text) // 2
            for part in (text[:cut], text[cut:-1]):
                if len(part):
                    junk = torch.cat([part, torch.tensor([9, 9])])[
                        None
                    ]  # two rejected drafts behind every step
                    output = target.forward(junk, cache=cache, taps=session.taps)
                    cache.length = cache.length - 2
                    session.observe(output.hidden_BLD, output.taps_BLFD, len(part))
            drafted = session.hidden(int(text[-1]))
            torch.testing.assert_close(drafted, hidden[b, a], atol=2e-4, rtol=1e-4)
            checked += 1
    assert checked > 10


def drafted(drafter: BlockDrafter, samples: data.Samples) -> tuple[packing.Batch, Anchors, torch.Tensor]:
    """Packed rows with one block in each, from place 7 on, and the drafter's hidden states of them."""
    batch = packing.collate(packing.pack(samples, 64, seed=0))
    rows = batch.tokens_BL.shape[0]
    anchors = Anchors(torch.tensor([[7]] * rows), torch.ones(rows, 1, 4).bool())
    return batch, anchors, drafter(batch, target_features(drafter.target, batch, drafter.config), anchors)


def test_markov_bias_in_training_equals_drafting(target: Target, samples: data.Samples) -> None:
    drafter = build(target, samples, markov_rank=8)
    batch, anchors, hidden = drafted(drafter, samples)
    factors = drafter.markov_factors(batch, anchors, hidden)
    assert factors is not None
    session = BlockSession(drafter, target.new_cache(1, 8), 8)
    for k in range(4):
        inputs = session.bias_inputs(hidden[0, 0, k].detach())
        assert inputs is not None
        bias = session.bias(inputs, batch.tokens_BL[0, 7 + k])
        torch.testing.assert_close(bias, (factors[0][0, 0, k] @ factors[1]).detach(), atol=1e-5, rtol=1e-5)


def test_confidence_in_training_equals_drafting_and_touches_nothing_else(
    target: Target, samples: data.Samples
) -> None:
    drafter = build(target, samples, confidence_head=True)
    batch, anchors, hidden = drafted(drafter, samples)
    logits = drafter.confidence_logits(batch, anchors, hidden)
    assert logits is not None
    session = BlockSession(drafter, target.new_cache(1, 8), 8)
    for k in range(4):
        foretold = session.confidence(hidden[0, 0, k].detach(), batch.tokens_BL[0, 7 + k][None])
        assert foretold == pytest.approx(float(logits[0, 0, k].sigmoid()), rel=1e-5)
    logits.sum().backward()
    reached = {name for name, p in drafter.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert reached == {"confidence.out.weight", "confidence.out.bias"}


def test_starting_weights_are_the_targets(target: Target, samples: data.Samples) -> None:
    drafter = from_target(target, options(layers=2), None)
    assert drafter.config.init_layer_ids == [0, 3] and drafter.draft_size == target.vocab_size
    mine, theirs = drafter.layers[1].mlp.up_proj.weight, target.layers[3].mlp.up_proj.weight
    assert torch.equal(mine, theirs)
    fresh = from_target(target, options(init_from_target=False), None)
    assert not torch.equal(fresh.layers[1].mlp.up_proj.weight, theirs)
    again = from_target(target, options(init_from_target=False), None)
    assert torch.equal(fresh.fc.weight, again.fc.weight)


def test_target_is_not_trained_or_saved(target: Target, samples: data.Samples) -> None:
    drafter = build(target, samples)
    names = {n for n, _ in drafter.named_parameters()}
    assert not any("embed" in n or "head" in n for n in names)
    assert "layers.0.self_attn.q_proj.weight" in names and "layers.1.mlp.down_proj.weight" in names


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder_round_trip(
    target: Target, samples: data.Samples, tmp_path: Path, variant: dict[str, Any]
) -> None:
    drafter = build(target, samples, **variant)
    save_drafter(drafter, tmp_path, card="# card\n", dtype=torch.float32)
    again = load_drafter(tmp_path, target)
    assert again.config == drafter.config and torch.equal(again.draft_vocab, drafter.draft_vocab)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
    assert (tmp_path / "README.md").read_text() == "# card\n"


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


def test_anchors(target: Target, samples: data.Samples) -> None:
    batch = packing.collate(packing.pack(samples, 64, seed=0))
    anchors = sample_anchors(batch, 40, 4, torch.Generator().manual_seed(0))
    for b in range(batch.tokens_BL.shape[0]):
        for a in range(anchors.index_BA.shape[1]):
            i = int(anchors.index_BA[b, a])
            for k in range(4):
                j = i + 1 + k
                good = j < 64 and bool((batch.document_BL[b, i : j + 1] == batch.document_BL[b, i]).all())
                good = (
                    good
                    and bool(batch.answer_BL[b, i + 1 : j + 1].all())
                    and int(batch.positions_BL[b, i]) > 0
                )
                good = good and int(batch.document_BL[b, i]) >= 0
                assert bool(anchors.valid_BAK[b, a, k]) == good


def test_mask_token_is_unused(target: Target) -> None:
    assert target.tokenizer.convert_ids_to_tokens(mask_token(target)) in ("<unused>", "<|endoftext|>")


def test_broken_folders(target: Target, samples: data.Samples, tmp_path: Path) -> None:
    def fails(says: str) -> None:
        with pytest.raises(UserError, match=says):
            load_drafter(tmp_path, target)

    fails("no config.json")
    drafter = build(target, samples)
    save_drafter(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(str(tmp_path / "model.safetensors"))

    def rewrite(changes: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))

    rewrite({"architectures": ["LlamaForCausalLM"]})
    fails("not a block drafter")
    rewrite({"vocab_size": 9})
    fails("vocab_size is 9")
    rewrite({"context": "tap"})
    fails("did you mean 'taps'")
    rewrite({"block_size": 0})
    fails("at least 1")
    rewrite({"target_layer_ids": [1, 77]})
    fails("target layer 77")
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "rms_norm_eps"})
    )
    fails("missing key 'rms_norm_eps'")
    rewrite({"draft_vocab_size": 63})
    fails("63 entries")
    for changes, words in {
        "block_size": (2.5, "block_size must be a whole number, not 2.5"),
        "mask_token_id": (99999, "mask_token_id=99999 is not within"),
        "hidden_act": ("sillu", "did you mean 'silu'"),
        "markov_rank": (-1, "markov_rank=-1 must be at least 0"),
        "rope_theta": (0, "rope_theta=0 must be at least"),
        "rms_norm_eps": (None, "rms_norm_eps must be a finite number"),
        "target_layer_ids": ("3", "target_layer_ids must be a list of whole numbers"),
        "extra": (3, "extra must be an object"),
    }.items():
        rewrite({changes: words[0]})
        fails(words[1])
    rewrite({"block_size": 100000})
    fails("must be 1 to 512")
    for junk in ("[]", "null", "3"):
        (tmp_path / "config.json").write_text(junk)
        fails("must hold an object")
    rewrite({"intermediate_size": 64})
    fails("has shape")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({k: v for k, v in weights.items() if k != "fc.weight"}, str(tmp_path / "model.safetensors"))
    fails("misses 'fc.weight'")
    save_file({**weights, "odd": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    fails("unknown tensor 'odd'")
    twice = weights["draft_vocab"].clone()
    twice[1] = twice[0]
    for vocab in (
        twice,
        weights["draft_vocab"].flip(0),
        weights["draft_vocab"] + 5000,
        weights["draft_vocab"].float(),
    ):
        save_file({**weights, "draft_vocab": vocab}, str(tmp_path / "model.safetensors"))
        fails("draft_vocab must be ascending token ids")
    for value in (float("nan"), float("inf")):
        save_file({**weights, "fc.weight": weights["fc.weight"] * value}, str(tmp_path / "model.safetensors"))
        fails("fc.weight holds values that are no numbers")
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    fails("not readable")
    with pytest.raises(UserError, match="no such folder"):
        load_drafter(tmp_path / "nowhere", target)


@pytest.mark.parametrize("markov_rank", [0, 8])
@pytest.mark.parametrize("context", ["shared_kv", "taps"])
def test_a_lightened_drafter_drafts_the_same_up_to_rounding(
    target: Target, samples: data.Samples, context: str, markov_rank: int
) -> None:
    heavy = build(target, samples, context=context, markov_rank=markov_rank)
    light = build(target, samples, context=context, markov_rank=markov_rank)
    light.load_state_dict(heavy.state_dict())
    light.prepare_for_drafting()
    results = []
    for drafter in (heavy, light):
        cache = target.new_cache(1, 20)
        session = BlockSession(drafter, cache, 20)
        output = target.forward(torch.arange(5, 15)[None], cache=cache, taps=session.taps)
        session.observe(output.hidden_BLD, output.taps_BLFD, 10)
        hidden = session.hidden(7)
        logits, inputs = drafter.logits(hidden), session.bias_inputs(hidden)
        results.append(logits if inputs is None else logits + session.bias(inputs[1], torch.tensor(9)))
    scale = float(results[0].abs().max())
    torch.testing.assert_close(results[1], results[0], atol=2e-2 * scale, rtol=2e-2)
