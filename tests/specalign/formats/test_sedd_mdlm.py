"""Published checkpoints load into what was written, bit for bit, and what does not fit is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specalign.common.errors import UserError
from specalign.formats.sedd_mdlm import load_published, save_ddit
from specalign.models.ddit import DDiT
from tests.published_ddits import MDLM, SEDD, network, state, write_hub

HUB: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sedd": (SEDD, {"scale_by_sigma": True}, "log_score"),
    "mdlm": (MDLM, {"time_input": "zero"}, "logits"),
}


def assert_same(net: DDiT, expected: DDiT) -> None:
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name
    assert net.config == expected.config
    assert not net.training


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("family", HUB)
def test_hub_folders(tmp_path: Path, family: str, pickled: bool) -> None:
    config, changes, prediction = HUB[family]
    net, prefix = network(**changes), "" if family == "sedd" else "backbone."
    tensors = state(net, prefix)
    loaded, process = load_published(write_hub(tmp_path, config, tensors, pickled))
    assert_same(loaded, net)
    assert (process["prediction"], process["mask_id"]) == (prediction, 10)


def test_mdlm_without_time_conditioning_is_fed_sigma_zero(tmp_path: Path) -> None:
    net, rows = network(time_input="zero"), torch.tensor([[10, 3, 10]])
    one, two = (
        load_published(write_hub(tmp_path / str(on), {**MDLM, "time_conditioning": on}, tensors))[0]
        for on, tensors in ((False, state(net, "backbone.")), (True, state(net, "backbone.")))
    )  # fmt: skip
    zero = one(rows, torch.zeros(1))
    assert torch.equal(one(rows, torch.tensor([5.0])), zero)
    assert torch.equal(two(rows, torch.zeros(1)), zero)
    assert not torch.allclose(two(rows, torch.tensor([5.0])), zero, atol=1e-2)


def _put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("blocks.1.attn_out.weight"), r"missing tensor 'blocks.1.attn_out.weight' of shape \(16, 16\)"),
        (_put("output_layer.linear.bias", torch.zeros(12)), r"linear.bias has shape \(12,\), expected \(11,\)"),
        (_put("blocks.2.norm1.weight", torch.zeros(16)), "has an unknown tensor 'blocks.2.norm1.weight'"),
        (lambda t: t.pop("vocab_embed.embedding"), "no tensor 'vocab_embed.embedding'.*sedd, mdlm"),
        (_put("blocks.0.norm2.weight", torch.full((16,), torch.nan)), "blocks.0.norm2.weight contains non-finite"),
        (_put("rotary_emb.inv_freq", torch.tensor([1.0, 0.2, 0.1, 0.01])), "does not use base 10000"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], says: str
) -> None:
    tensors = state(network(scale_by_sigma=True))
    change(tensors)
    with pytest.raises(UserError, match=says):
        load_published(write_hub(tmp_path, SEDD, tensors))


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (without(SEDD, "tokens") | {"model_type": "sedd"}, "config.json: missing key 'tokens'"),
        ({**SEDD, "graph": {"type": "absorbing"}}, "graph.type='absorbing': must be one of .*'absorb'"),
        ({**SEDD, "noise": {"type": "geometric", "sigma_min": 2, "sigma_max": 1}}, "noise.sigma_min=2 and sigma_max=1"),
        ({**SEDD, "model": {**SEDD["model"], "n_heads": 3}}, "config.json: ddit config: hidden_size=16, n_heads=3"),
        ({**SEDD, "mask_token_id": 11}, r"mask_token_id=11 is not an id within 0\.\.10"),
        ({**MDLM, "time_conditioning": 0}, "time_conditioning=0: must be one of"),
        ({**MDLM, "causal": True}, "causal=true: autoregressive"),
    ],
)  # fmt: skip
def test_configs_that_do_not_fit(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    prefix = "" if "graph" in config else "backbone."
    with pytest.raises(UserError, match=says) as caught:
        load_published(write_hub(tmp_path, config, state(network(scale_by_sigma=True), prefix)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "schedule", "mask_id"),
    [
        ({"scale_by_sigma": True}, {"name": "loglinear"}, 10),
        ({"vocab_size": 10}, {"name": "geometric", "sigma_min": 1e-3, "sigma_max": 9.0}, 9),
        ({"attention": "prefix_causal", "dropout": 0.0}, {"name": "loglinear"}, 4),
    ],
)
def test_round_trip(
    tmp_path: Path, changes: dict[str, Any], schedule: dict[str, Any], mask_id: int
) -> None:
    net = network(**changes)
    save_ddit(net, tmp_path, schedule, mask_id)
    loaded, process = load_published(tmp_path)
    assert_same(loaded, net)
    assert (process["schedule"], process["mask_id"]) == (schedule, mask_id)
