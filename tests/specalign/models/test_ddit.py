"""The DDiT against a float64 reference in plain loops; published sizes; cached drafting = one full forward."""

from typing import Any

import pytest
import torch

from specalign.common.errors import UserError
from specalign.lm.cache import KVCache
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig
from tests.builders import ddit as network
from tests.builders import ddit_config as config
from tests.builders import random_tokens as tokens
from tests.ddit_reference import reference

# ---- published names, shapes, order ----


def published_names(n_blocks: int) -> list[str]:
    """Parameters in the published order, written down from the published modules."""
    norm = ["weight"]
    linear = ["weight", "bias"]
    names = ["vocab_embed.embedding"]
    names += [f"sigma_map.mlp.{i}.{kind}" for i in (0, 2) for kind in linear]
    for i in range(n_blocks):
        b = f"blocks.{i}."
        names += [f"{b}{name}.weight" for name in ("norm1", "attn_qkv", "attn_out")]
        names += [f"{b}norm2.{kind}" for kind in norm]
        names += [f"{b}mlp.{j}.{kind}" for j in (0, 2) for kind in linear]
        names += [f"{b}adaLN_modulation.{kind}" for kind in linear]
    names += [f"output_layer.norm_final.{kind}" for kind in norm]
    names += [f"output_layer.linear.{kind}" for kind in linear]
    return names + [f"output_layer.adaLN_modulation.{kind}" for kind in linear]


SMALL = {"vocab_size": 50258, "hidden_size": 768, "n_blocks": 12, "n_heads": 12}
MEDIUM = {"vocab_size": 50258, "hidden_size": 1024, "n_blocks": 24, "n_heads": 16}


@pytest.mark.parametrize(
    ("sizes", "state", "parameters"),
    [(SMALL, 131, 169_627_218), (MEDIUM, 251, 424_477_010)],
    ids=["sedd-small", "sedd-medium"],
)
def test_published_sizes(sizes: dict[str, Any], state: int, parameters: int) -> None:
    with torch.device("meta"):
        net = DDiT(DDiTConfig(**sizes))
    named = dict(net.named_parameters())
    assert len(net.state_dict()) == state
    assert len(named) == state - 1
    assert net.state_dict().keys() - named.keys() == {"rotary_emb.inv_freq"}
    assert sum(p.numel() for p in named.values()) == parameters
    assert list(named) == published_names(sizes["n_blocks"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"time_input": "zero"},
        {"attention": "prefix_causal", "n_blocks": 1, "n_heads": 4, "hidden_size": 8},
    ],
    ids=["sedd", "mdlm", "prefix-causal"],
)
@pytest.mark.parametrize("per_token", [False, True], ids=["sigma_B", "sigma_BL"])
def test_forward_is_the_papers(changes: dict[str, Any], per_token: bool) -> None:
    """MDLM's time_conditioning=false: σ counts as 0, whatever it is given."""
    net, rows = network(**changes), tokens(2, 5)
    sigma = torch.tensor([[0.0, 0.0, 0.7, 0.7, 3.1], [0.2, 1.1, 5.0, 0.4, 0.4]])
    sigma = sigma if per_token else sigma[:, 2]
    positions = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 0, 1, 2]])
    block = torch.arange(5) // (1 if net.attention == "prefix_causal" else 100)
    see = None if net.attention == "full" else (block <= block[:, None])[None, None]
    f_BLV = net(rows, sigma, positions_BL=positions, see=see)
    zero = changes.get("time_input") == "zero"
    for b in range(2):
        levels = torch.zeros(5) if zero else sigma[b].expand(5)
        expected = reference(net, rows[b], levels, positions[b], block <= block[:, None])
        assert float(expected.abs().max()) > 0.5  # the comparison sees something
        torch.testing.assert_close(f_BLV[b].double(), expected, atol=2e-5, rtol=2e-5)


def none(rows: int) -> torch.Tensor:
    return torch.empty(rows, 0, dtype=torch.int64)


def extend(net: DDiT, clean: torch.Tensor, cache: KVCache) -> None:
    """Clean tokens alone."""
    net.denoise(clean, none(len(clean)), cache, sigma_B=torch.zeros(len(clean)))


@torch.no_grad()
def test_cached_drafting_is_one_full_forward() -> None:
    """At every split point, for every noise level, twice from the same cache."""
    size, net = 3, network(attention="prefix_causal")
    text, noisy = tokens(2, 12), tokens(2, size, seed=7)
    for split in range(13):
        cache = net.new_cache(12 + size, rows=2)
        if split:
            extend(net, text[:, :split], cache)
        see = torch.ones(split + size, split + size, dtype=torch.bool).tril()
        see[split:] = True
        for level in (0.2, 3.0):
            sigma_B = torch.full((2,), level)
            sigma_BL = torch.cat((torch.zeros(2, split), sigma_B[:, None].expand(-1, size)), dim=1)
            full = net(torch.cat((text[:, :split], noisy), dim=1), sigma_BL, see=see[None, None])
            drafted, _ = net.denoise(none(2), noisy, cache, sigma_B=sigma_B)
            assert cache.length == split
            if split > 1:  # the last clean token along with the block
                cache.length = split - 1
                clean = text[:, split - 1 : split]
                together, _ = net.denoise(clean, noisy, cache, sigma_B=sigma_B)
                assert cache.length == split
                torch.testing.assert_close(together, drafted, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(drafted, full[:, split:], atol=1e-5, rtol=1e-5)


def test_half_precision_keeps_norms_and_positions() -> None:
    """bf16 at position 3001: rotary tables taken from a rounded inv_freq would be off by radians."""
    net = network()
    half = network().to(torch.bfloat16)
    assert half.rotary_emb.inv_freq.dtype == torch.bfloat16
    cos, _ = half.rotary_emb(torch.tensor([[3001]]))
    assert torch.equal(cos, net.rotary_emb(torch.tensor([[3001]]))[0])
    x = 1000 + torch.randn(4, 16, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    normed, expected = half.output_layer.norm_final(x), net.output_layer.norm_final(x.float())
    torch.testing.assert_close(normed.float(), expected, atol=0.02, rtol=0.02)
    f_BLV = half(tokens(2, 5), torch.tensor([0.5, 1.5]))
    assert f_BLV.dtype == torch.bfloat16
    expected = net(tokens(2, 5), torch.tensor([0.5, 1.5]))
    torch.testing.assert_close(f_BLV.float(), expected, atol=0.4, rtol=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_blocks": 0},
        {"time_input": "sigmas"},
        {"attention": "causal"},
        {"hidden_size": 18, "n_heads": 4},
    ],
)
def test_a_bad_config_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"ddit config: {next(iter(changes))}="):
        config(**changes)
