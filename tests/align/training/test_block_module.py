"""The variable-prefix drafter in training: its prefixes have their law and belong to their place, its loss begins after
them, and it computes what decoding computes. The causal drafter's statistics by their definition."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from align.config.drafter import LOSS_NAMES
from align.config.parser import load_recipe
from align.data import packing
from align.losses.distillation import Objective, after_prefix
from align.losses.divergences import RowStatistics
from align.training.block_module import CausalDrafterModule
from align.training.datamodule import draw_prefixes
from specalign.common.batch import Anchors, Batch, Step
from specalign.common.rng import keyed_generator
from specalign.diffusion.noise import clean_prefixes, sample_anchors
from specalign.lm.model import Target
from specalign.models.block_session import BlockSession
from specalign.models.target_features import target_features
from specalign.rows import shards as data
from tests.builders import ANCHORS, causal_drafter, packed_batch
from tests.builders import TRAINED_BLOCKS as VARIANTS
from tests.builders import trained_block as build

K = 4


@pytest.fixture(scope="module")
def batch(samples: data.Samples) -> Batch:
    return packing.collate(packing.pack(samples, 64, seed=0))


# ---- which prefixes ----


@pytest.mark.parametrize("decay", [0.9, 0.3, 1.0])
def test_prefixes_have_their_law(decay: float) -> None:
    """Pr(j) ∝ decay^j over the j that leave something to predict."""
    rows, count = 20, 500
    sizes = torch.arange(count)[:, None] % (K + 1)
    valid = (torch.arange(K) < sizes).expand(rows, -1, -1)
    anchors = Anchors(torch.arange(count).expand(rows, -1), valid)
    drawn = clean_prefixes(anchors, decay, count, [keyed_generator(7, row) for row in range(rows)])
    for size in range(K + 1):
        own = drawn[:, torch.arange(count) % (K + 1) == size].flatten()
        law = torch.tensor([decay**j for j in range(max(size, 1))], dtype=torch.float64)
        shares, law = own.bincount(minlength=K)[: len(law)] / len(own), law / law.sum()
        assert int(own.max()) < max(size, 1)
        assert bool(((shares - law).abs() <= 4 * (law * (1 - law) / len(own)).sqrt()).all())


def test_a_prefix_belongs_to_its_place_in_the_stream(batch: Batch) -> None:
    """Whatever rows and however many anchors stand beside it: so processes and resumed runs agree."""
    recipe = load_recipe(["recipe=debug_block", "objective.prefix_decay=1"])
    anchors = sample_anchors(batch, 12, K, torch.Generator().manual_seed(2))
    rows, length = batch.tokens_BL.shape
    together = draw_prefixes(recipe, anchors, length, range(5, 5 + rows))
    assert together is not None and len(together.unique()) == K
    for b in range(rows):
        fewer = Anchors(anchors.index_BA[b : b + 1, 3:9], anchors.valid_BAK[b : b + 1, 3:9])
        alone = draw_prefixes(recipe, fewer, length, [5 + b])
        assert alone is not None and torch.equal(alone[0], together[b, 3:9])
    elsewhere = draw_prefixes(recipe, anchors, length, range(6, 6 + rows))
    assert not torch.equal(elsewhere, together)  # type: ignore[arg-type]
    assert draw_prefixes(load_recipe(["recipe=debug_block"]), anchors, length, range(rows)) is None


# ---- what the network is shown ----


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_graph_equals_drafting(
    target: Target, samples: data.Samples, batch: Batch, variant: dict[str, Any]
) -> None:
    """Hidden states and Markov biases after every prefix, from packed rows and from the decoder's session."""
    drafter = build(target, samples, **variant)
    anchors = sample_anchors(batch, 8, K, torch.Generator().manual_seed(2))
    clean_BA = torch.arange(anchors.index_BA.numel()).view(anchors.index_BA.shape) % K
    clean_BA = clean_BA.minimum((anchors.valid_BAK.sum(-1) - 1).clamp_min(0))
    features = target_features(target, batch, drafter.config)
    hidden = drafter(batch, features, anchors, clean_BA)
    factors = drafter.markov_factors(batch, anchors, hidden)
    checked = []
    for b, a in anchors.valid_BAK[..., 0].nonzero().tolist():
        place, clean = int(anchors.index_BA[b, a]), int(clean_BA[b, a])
        own = batch.document_BL[b] == batch.document_BL[b, place]
        context = batch.tokens_BL[b][own & (torch.arange(64) < place)]
        cache = target.new_cache(1, 64)
        session = BlockSession(drafter, cache, 64)
        output = target.forward(context[None], cache=cache, taps=session.taps)
        session.observe(output.hidden_BLD, output.taps_BLFD, len(context))
        shown = batch.tokens_BL[b, place : place + clean + 1]
        block_K = torch.cat(
            (shown, torch.full((drafter.config.rows - len(shown),), drafter.config.mask_token_id))
        )
        drafted = session.draft_hidden_of_blocks(block_K[None])[0]
        torch.testing.assert_close(drafted, hidden[b, a], atol=2e-4, rtol=1e-4)
        inputs = session.bias_inputs(drafted)
        if factors is not None and inputs is not None:
            bias = session.bias(inputs[clean], shown[-1])  # the last clean token is the one before
            expected = (factors[0][b, a, clean] @ factors[1]).detach()
            torch.testing.assert_close(bias, expected, atol=1e-4, rtol=1e-3)
        checked.append(clean)
    assert len(checked) > 10 and set(checked) == set(range(K))


# ---- which positions count ----


def random_statistics(shape: tuple[int, ...]) -> RowStatistics:
    generator = torch.Generator().manual_seed(3)
    made = {f.name: torch.rand(shape, generator=generator) for f in fields(RowStatistics)}
    return RowStatistics(**{**made, "log_q_label": made["log_q_label"].log().requires_grad_()})


@pytest.mark.parametrize("weighting", ["exponential", "normalised", "d_pace", "uniform"])
@pytest.mark.parametrize("term", LOSS_NAMES)
def test_the_loss_after_a_prefix_is_that_of_a_shorter_block(term: str, weighting: str) -> None:
    """Every weight and product begins at the first masked position; what stands before it changes no value and gets no
    gradient."""
    objective = Objective({term: 1.0}, weighting, decay=7.0)
    s, clean = random_statistics((3, K, K)), torch.arange(K).expand(3, -1)
    valid = torch.arange(K) < torch.tensor([K, K - 1, 0])[:, None, None].expand(-1, K, -1)
    loss = objective.per_position(*after_prefix(s, valid, clean)).sum(-1)

    def one(b: int, j: int) -> Tensor:
        cut = {f.name: getattr(s, f.name)[b, j, j:] for f in fields(RowStatistics)}
        return objective.per_position(RowStatistics(**cut), valid[b, j, j:]).sum()

    expected = torch.stack([torch.stack([one(b, j) for j in range(K)]) for b in range(3)])
    torch.testing.assert_close(loss, expected)
    if term in ("cross_entropy", "streak"):
        gradient = torch.autograd.grad(loss.sum(), s.log_q_label)[0]
        counted = valid & (torch.arange(K) >= clean[..., None])
        assert torch.equal(gradient != 0, counted)


def test_statistics_of_causal_drafters_are_those_of_p_and_q(target: Target) -> None:
    made, rows = causal_drafter(target), packed_batch(target)
    valid = ANCHORS.valid_BAK.clone()
    valid[0, 1, 2:] = False
    step = Step(rows, Anchors(ANCHORS.index_BA, valid))
    module = CausalDrafterModule(made, load_recipe(["recipe=debug_autoregressive"]))
    s = module.model_step(step, 1.0)
    with torch.no_grad():
        q = made.logits(made(rows)).softmax(-1)
    mask = rows.attention_mask()
    logits = target.forward(rows.tokens_BL, mask=mask, positions_BL=rows.positions_BL).logits_BLV
    assert logits is not None and s.forward_kl is not None
    p = logits.softmax(-1)
    for b, a, k in valid.nonzero().tolist():
        at = int(ANCHORS.index_BA[b, a]) + k
        label = int(rows.tokens_BL[b, at + 1])
        own_p, own_q = p[b, at], q[b, at]
        expected = {
            "acceptance": torch.minimum(own_p, own_q).sum(),
            "forward_kl": (own_p * (own_p / own_q).log()).sum(),
            "log_q_label": own_q[label].log(),
            "p_label": own_p[label],
            "match": (own_p.argmax() == own_q.argmax()).float(),
        }
        for name, value in expected.items():
            torch.testing.assert_close(getattr(s, name)[b, a, k], value, atol=1e-4, rtol=1e-3)
