"""A layer's weights by a drafter's names, whatever the layer calls them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.lm.debug import debug_model
from specalign.lm.inspection.parts import embedding_scale, embeds_rows, layer_parts
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from tests.target_models import tiny_target
from tests.target_wrappers import tiny_wrapper


def computed_keys(target: Target, parts: dict[str, Tensor], x: Tensor, centred: bool) -> Tensor:
    """Layer 0's keys of its input (…, D) at position 0; without the norm's bias, which a drafter's norms lack."""
    x = F.layer_norm(x, x.shape[-1:]) if centred else F.rms_norm(x, x.shape[-1:], eps=1e-6)
    weight, bias = parts["self_attn.k_proj.weight"], parts.get("self_attn.k_proj.bias")
    return F.linear(x * parts["input_layernorm.weight"], weight, bias)


@pytest.mark.parametrize("kind", ["phi3", "gpt2", "gemma"])
def test_norm_and_keys_are_found(kind: str) -> None:
    """One projection for all, transposed weights, norms that multiply by one more: the keys in the
    cache come out."""
    target = tiny_target(kind)
    layer: Any = target.layers[0]
    norms = [m for n, m in layer.named_modules() if "norm" in n or n.startswith("ln_")]
    for norm in norms:
        if getattr(norm, "bias", None) is not None:
            nn.init.zeros_(norm.bias)
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    cache = target.new_cache(1, 1)
    target.forward(torch.tensor([[77]]), cache=cache)
    handle.remove()
    keys = computed_keys(target, layer_parts(target, 0), seen[0], kind == "gpt2")
    torch.testing.assert_close(keys.flatten(), cache.k(0).flatten(), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "scale", "rows"), [("llama", 1, True), ("gemma2", 8, True), ("muse_glimmer", 1, False)]
)
def test_what_is_done_to_a_row_of_the_embedding(kind: str, scale: float, rows: bool) -> None:
    """Gemma's scale, and Muse Glimmer's norm."""
    if kind == "muse_glimmer":
        tokenizer = debug_model("Llama")[1]
        target = prove_target(tiny_wrapper(kind, len(tokenizer)), tokenizer, ModelSource(kind))
    else:
        target = tiny_target(kind)
    assert (embedding_scale(target), embeds_rows(target)) == (scale, rows)
