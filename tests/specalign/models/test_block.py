"""The block drafter: what is trained is what drafts, for both contexts; folders round-trip; bad folders say why."""

import itertools

import pytest
import torch

from align.data import packing
from align.makers.block import from_target
from specalign.common.batch import Anchors
from specalign.diffusion.noise import sample_anchors
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_layers import TwoTapConvolution
from specalign.models.block_session import BlockSession
from specalign.models.markov import KINDS
from specalign.models.target_features import target_features
from specalign.rows import shards as data
from tests.builders import block_options
from tests.builders import trained_block as build
from tests.target_models import needs_recent, tiny_target


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        ("llama", "taps"),
        ("gpt2", "shared_kv"),  # keys without positions: a vector for each row of a block
        ("glm", "shared_kv"),  # a part of each head, in neighbouring pairs
        ("exaone4", "shared_kv"),  # one layer has positions, the other none
        pytest.param("gemma3n_text", "shared_kv", marks=needs_recent),  # two bases
        ("mimo_v2_flash", "shared_kv"),  # values that are narrower than keys
        ("lfm2", "shared_kv"),  # recurrent states, which packed documents must not share
        ("mamba", "taps"),
        ("gemma3_text", "taps"),  # rotary tables of its own
    ],
)
def test_training_graph_equals_drafting(samples: data.Samples, kind: str, context: str) -> None:
    """Same hidden states, position by position, from packed rows and from the decoder's session and cache, whatever the target's
    keys, positions and states. Drafters of all shapes: tests/align/training/test_block_module.py."""
    target = tiny_target(kind)
    drafter = build(target, samples, context=context)
    batch = packing.collate(packing.pack(samples, 64, seed=0))
    anchors = sample_anchors(batch, 4, 4, torch.Generator().manual_seed(2))
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
                    junk = torch.cat([part, torch.tensor([9, 9])])[None]  # two rejected drafts
                    output = target.forward(junk, cache=cache, taps=session.taps)
                    cache.length = cache.length - 2
                    session.observe(output.hidden_BLD, output.taps_BLFD, len(part))
            drafted = session.draft_hidden(int(text[-1]))
            torch.testing.assert_close(drafted, hidden[b, a], atol=2e-4, rtol=1e-4)
            checked += 1
    assert checked > 2


@pytest.mark.parametrize("kind", ["phi3", "glm", "ernie4_5", "gemma2"])
def test_a_fresh_layer_writes_its_targets_keys(samples: data.Samples, kind: str) -> None:
    """Weights, norm and positions are those of the layer that it started from: what it makes of that layer's input is in the cache."""
    target = tiny_target(kind)
    drafter = from_target(target, block_options(layers=2), None)
    cache, seen, tokens = target.new_cache(1, 40), [], torch.arange(20, 60)[None]
    handle = target.layers[3].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    target.forward(tokens, cache=cache)
    handle.remove()
    layer, cos_sin = drafter.blocks[1], drafter.rotary_tables(seen[0], torch.arange(40)[None])
    k, v = layer.self_attn.keys_values(layer.input_layernorm(seen[0]), *cos_sin)
    torch.testing.assert_close(k, cache.k(3), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(v, cache.v(3), atol=1e-4, rtol=1e-3)


def drafted(
    drafter: BlockDrafter, samples: data.Samples
) -> tuple[packing.Batch, Anchors, torch.Tensor]:
    """Packed rows with one block in each, from place 7 on, and the drafter's hidden states of them."""
    batch = packing.collate(packing.pack(samples, 64, seed=0))
    rows = batch.tokens_BL.shape[0]
    anchors = Anchors(torch.tensor([[7]] * rows), torch.ones(rows, 1, 4).bool())
    features = target_features(drafter.target, batch, drafter.config)
    return batch, anchors, drafter(batch, features, anchors)


@pytest.mark.parametrize("kind", KINDS)
def test_markov_bias_is_that_of_drafting(target: Target, samples: data.Samples, kind: str) -> None:
    drafter = build(target, samples, markov_rank=8, markov=kind)
    batch, anchors, hidden = drafted(drafter, samples)
    factors = drafter.markov_factors(batch, anchors, hidden)
    assert factors is not None
    session = BlockSession(drafter, target.new_cache(1, 8), 8)
    for k in range(4):
        inputs = session.bias_inputs(hidden[0, 0, k].detach())
        assert inputs is not None
        bias = session.bias(inputs, batch.tokens_BL[0, 7 + k])
        expected = (factors[0][0, 0, k] @ factors[1]).detach()
        torch.testing.assert_close(bias, expected, atol=1e-5, rtol=1e-5)


def test_confidence_in_training_equals_drafting(target: Target, samples: data.Samples) -> None:
    drafter = build(target, samples, confidence_head=True)
    batch, anchors, hidden = drafted(drafter, samples)
    logits = drafter.confidence_logits(batch, anchors, hidden)
    assert logits is not None
    session = BlockSession(drafter, target.new_cache(1, 8), 8)
    for k in range(4):
        foretold = session.confidence(hidden[0, 0, k].detach(), batch.tokens_BL[0, 7 + k][None])
        assert foretold == pytest.approx(float(logits[0, 0, k].sigmoid()), rel=1e-5)
    logits.sum().backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    reached = {name for name, gradient in gradients.items() if gradient.any()}
    assert reached == {"confidence.out.weight", "confidence.out.bias"}


def test_two_tap_convolutions() -> None:
    """Against sums written out: nothing crosses from one block to another."""
    generator = torch.Generator().manual_seed(0)
    layer, width, size = TwoTapConvolution(32), 32, 3
    x = torch.randn(2, size, width, generator=generator)
    assert torch.equal(layer(x, torch.cos), x.cos())  # the identity at the start, to the bit
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def by_hand(rows: torch.Tensor, which: int) -> torch.Tensor:
        out = torch.zeros_like(rows)
        for b, i in itertools.product(range(2), range(size)):
            delta = (layer.delta.weight @ x[b, i]).view(2, 2, width // 16)[which]
            delta = delta.repeat_interleave(16, -1)
            out[b, i] = (1 + layer.offset[which, 0] + delta[0]) * rows[b, i]
            if i:
                out[b, i] += (layer.offset[which, 1] + delta[1]) * rows[b, i - 1]
        return out

    expected = by_hand(by_hand(x, 0).cos(), 1)
    torch.testing.assert_close(layer(x, torch.cos), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("context", ["shared_kv", "taps"])
def test_both_layouts_read_one_block(target: Target, samples: data.Samples, context: str) -> None:
    """A fill-in block of K drafts has the input of an anchor-first block of K + 1, whose first row is not a draft then: the same
    hidden states one row further on, in training and in decoding, and the bias of the token before each draft."""
    common = {"context": context, "markov_rank": 8, "convolution": True}
    wide = build(target, samples, **common, block_size=5)
    drafter = build(target, samples, **common, block_size=4, block_layout="fill_in")
    drafter.load_state_dict(wide.state_dict())
    batch = packing.collate(packing.pack(samples, 64, seed=0))
    features = target_features(target, batch, drafter.config)
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    few, many = (sample_anchors(batch, 9, k, g) for k, g in zip((4, 5), generators, strict=True))
    assert torch.equal(few.index_BA, many.index_BA)
    hidden, rows = drafter(batch, features, few), wide(batch, features, many)
    assert hidden.shape[2] == 4 and torch.equal(hidden, rows[:, :, 1:])
    z, _ = drafter.markov_factors(batch, few, hidden)  # type: ignore[misc]
    before = batch.tokens_BL[torch.arange(len(batch.tokens_BL))[:, None, None], few.places_BAK(64)]
    assert drafter.markov is not None
    torch.testing.assert_close(z, drafter.markov(rows[:, :, 1:], before, target.embed))
    sessions = [BlockSession(net, target.new_cache(1, 20), 20) for net in (drafter, wide)]
    for session in sessions:
        output = target.forward(torch.arange(5, 15)[None], cache=session.cache, taps=session.taps)
        session.observe(output.hidden_BLD, output.taps_BLFD, 10)
    alone, whole = (session.draft_hidden(7) for session in sessions)
    assert len(alone) == 4 and torch.equal(alone, whole[1:])
