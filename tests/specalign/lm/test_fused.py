"""Which targets run their layers in one call, and that it is what their modules compute."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.speculation.tree import ancestors
from specalign.kernels.linear import rows_library
from specalign.lm.cache import Slots
from specalign.lm.debug import debug_model
from specalign.lm.fused import FusedLayers
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from tests.target_models import some_text, tiny_config, tiny_model, tiny_target

pytestmark = pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")

FULL = {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 4}


def target_of(name: str, fuse: bool = True, **changes: Any) -> Target:
    """A tiny target without windows, with or without its layers in one call."""
    tokenizer = debug_model("Llama")[1]
    model = tiny_model(name, len(tokenizer))
    config = tiny_config(name, len(tokenizer))
    for key, value in {**FULL, **changes}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config._attn_implementation = "eager"
    made = type(model)(config).eval()
    made.load_state_dict(model.state_dict())
    return Target(made, tokenizer, ModelSource(name), fuse=fuse)


def outputs(target: Target) -> list[Tensor]:
    """Logits, taps and keys of a prefix, drafts in a tree, a rollback to one branch, and two requests at once."""
    text, found = some_text(target, 60), []
    cache, other = target.new_cache(1, 80), target.new_cache(1, 80)
    see_LL = ancestors((-1, -1, 1))
    target.forward(text[:, :40], cache=cache)
    for part, see in ((text[:, 40:44], see_LL), (text[:, 44:49], None), (text[:, 49:50], None)):
        output = target.forward(part, cache=cache, see_LL=see, taps=(0, 3))
        assert output.logits_BLV is not None and output.taps_BLFD is not None
        found += [output.logits_BLV, output.hidden_BLD, output.taps_BLFD]
        if see is not None:
            cache.keep(40, [0, 2, 3])
    target.forward(text[:, :7], cache=other)
    rows = [text[:, :4], text[:, 9:12]]
    for output in target.forward_batch(rows, [cache, other], [see_LL, None], taps=(1,)):
        assert output.logits_BLV is not None and output.taps_BLFD is not None
        found += [output.logits_BLV, output.taps_BLFD]
    return [*found, *(cache.k(i) for i in range(4)), *(other.v(i) for i in range(4))]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}), ("mistral", {}), ("qwen2", {}), ("qwen3", {}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    ],
)  # fmt: skip
def test_one_call_computes_what_the_modules_compute(name: str, changes: dict[str, Any]) -> None:
    quick, modules = target_of(name, **changes), target_of(name, fuse=False, **changes)
    check(quick, modules)


def check(quick: Target, modules: Target) -> None:
    assert quick.fused is not None and modules.fused is None
    for got, wanted in zip(outputs(quick), outputs(modules), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cohere", "gemma2", "granite", "mistral", "gpt2", "mixtral"])
def test_other_layers_keep_their_modules(name: str) -> None:
    """Other code, windows (mistral as `tiny_config` makes it), parts of their own: all but plain Llama."""
    assert tiny_target(name).fused is None


def test_a_proof_that_fails_falls_back_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FusedLayers.__call__
    monkeypatch.setattr(
        FusedLayers, "__call__", lambda *a: tuple(t if t is None else t * 1.1 for t in whole(*a))
    )
    tokenizer = debug_model("Llama")[1]
    target = prove_target(tiny_model("llama", len(tokenizer)), tokenizer, ModelSource("llama"))
    assert target.fused is None and not target.chains_only


def test_many_rows_go_through_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do rows without a cache, batches of one length, and rows with a mask of their own."""
    target = load_target("debug")
    assert target.fused is not None
    monkeypatch.setattr(FusedLayers, "__call__", lambda *a: pytest.fail("few rows alone"))
    text = some_text(target, 33)
    target.forward(text, cache=target.new_cache(1, 40))
    target.forward(text[:, :3])
    target.forward(text[:, :4].view(2, 2), cache=target.new_cache(2, 40))
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()
    target.forward(text[:, :2], cache=target.new_cache(1, 8), mask=mask)


def test_a_token_alone_and_among_drafts_to_the_bit() -> None:
    """Plain greedy decoding and verification of the same tokens see the same logits, ties included."""
    target = load_target("debug")
    text = some_text(target, 270)
    plain, drafted = target.new_cache(1, 280), target.new_cache(1, 280)
    for cache in (plain, drafted):
        target.forward(text[:, :253], cache=cache)
    # a part of keys ends between them
    logits = target.forward(text[:, 253:258], cache=drafted).logits_BLV
    assert logits is not None
    for i in range(5):
        one = target.forward(text[:, 253 + i : 254 + i], cache=plain).logits_BLV
        assert one is not None and torch.equal(one[0, 0], logits[0, i])


@pytest.mark.parametrize("seed", range(3))
def test_columns_of_keys_follow_the_cache(seed: int) -> None:
    """Whatever becomes of the cache, by calls of the C library and without it: a call gives the bits that it gives where all keys are
    turned into columns anew."""
    target, draw = load_target("debug"), Random(seed)
    cache, other = target.new_cache(1, 150), target.new_cache(1, 150)
    target.forward(some_text(target, 40), cache=other)

    def hidden() -> Tensor:
        length = cache.length
        found = target.forward(torch.tensor([[5, 7]]), cache=cache).hidden_BLD
        cache.length = length
        return found

    for _ in range(50):
        room = cache.capacity - cache.length
        what = draw.choice(["few", "tree", "many", "back", "keep", "fill", "place"])
        if what in ("few", "many") and room > 40:
            count = draw.randint(1, 7) if what == "few" else 35
            target.forward(some_text(target, count), cache=cache)
        elif what == "tree" and room > 8:
            before = cache.length
            target.forward(some_text(target, 5), cache=cache)
            cache.keep(before, sorted(draw.sample(range(5), draw.randint(1, 4))))
        elif what == "back" or room <= 40:
            cache.length = draw.randint(0, cache.length)
        elif what == "keep" and cache.length > 6:  # from before the last call on
            cache.keep(cache.length - 6, sorted(draw.sample(range(6), draw.randint(1, 5))))
        elif what == "fill" and cache.length >= other.length:
            cache.fill(other)
        elif what == "place" and cache.length:
            at_BL = torch.tensor([[draw.randrange(cache.length)]])
            cache.slots = Slots(torch.zeros(1, 1, dtype=torch.int64), at_BL, cache.length)
            for slab in cache.slabs:
                slab.update(*torch.randn(2, 1, slab.keys.shape[1], 1, slab.keys.shape[3]))
            cache.slots = None
        if draw.random() < 0.5:
            continue
        mine, views = hidden(), dict(cache.views)
        cache.views.clear()
        anew = hidden()
        cache.views.clear()
        cache.views.update(views)
        assert views and torch.equal(mine, anew), what
