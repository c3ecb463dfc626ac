"""Published checkpoints: every layout loads into what was written, bit for bit; what does not fit says why in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specalign.formats.published import load_published, save_published
from specalign.formats.published_config import ScheduleSpec
from tests.published_ddits import (
    BD3LM,
    BD3LM_RUN,
    MDLM,
    MDLM_RUN,
    RADD,
    SEDD,
    assert_same,
    averaged,
    network,
    refuses,
    state,
    write_hub,
    write_run,
)

# ---- what loads ----


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_sedd_on_the_hub(tmp_path: Path, pickled: bool) -> None:
    net = network(scale_by_sigma=True)
    loaded = load_published(write_hub(tmp_path, SEDD, state(net), pickled))
    assert_same(loaded.network, net)
    assert (loaded.family, loaded.mask_id) == ("sedd", 10)
    assert (loaded.prediction, loaded.network.config.time_input) == ("log_score", "sigma")
    assert loaded.schedule == ScheduleSpec("loglinear")


def test_radd_on_the_hub(tmp_path: Path) -> None:
    net = network(time_input="none", norm_bias=True)
    config = {**RADD, "model": {**RADD["model"], "cond_dim": 6}}
    loaded = load_published(write_hub(tmp_path, config, state(net)))
    assert_same(loaded.network, net)
    assert (loaded.family, loaded.prediction, loaded.network.config.time_input) == (
        "radd",
        "logits",
        "none",
    )
    assert loaded.mask_id == 10


def test_mdlm_on_the_hub_is_fed_sigma_zero(tmp_path: Path) -> None:
    net = network(time_input="zero")
    loaded = load_published(write_hub(tmp_path, MDLM, state(net, "backbone.")))
    assert_same(loaded.network, net)
    assert (loaded.family, loaded.prediction, loaded.network.config.time_input) == (
        "mdlm",
        "logits",
        "zero",
    )
    rows = torch.tensor([[10, 3, 10]])
    told, zero = loaded.network(rows, torch.tensor([5.0])), loaded.network(rows, torch.zeros(1))
    assert torch.equal(told, zero)
    conditioned = write_hub(tmp_path, {**MDLM, "time_conditioning": True}, state(net, "backbone."))
    loaded = load_published(conditioned)
    assert loaded.network.config.time_input == "sigma"
    assert torch.equal(
        loaded.network(rows, torch.zeros(1)), zero
    )  # time_conditioning=false was σ=0, not no σ
    assert not torch.allclose(loaded.network(rows, torch.tensor([5.0])), zero, atol=1e-2)


def test_bd3lm_on_the_hub(tmp_path: Path) -> None:
    net = network(time_input="zero", attention="block_causal", block_size=4)
    tensors = state(net, "backbone.")
    tensors |= {"sampling_eps_min": torch.tensor(0.25), "sampling_eps_max": torch.tensor(0.75)}
    loaded = load_published(write_hub(tmp_path, BD3LM, tensors))
    assert_same(loaded.network, net)
    assert (loaded.family, loaded.prediction, loaded.network.config.time_input) == (
        "bd3lm",
        "logits",
        "zero",
    )
    assert loaded.schedule.mask_rates == (0.25, 0.75)
    del tensors["sampling_eps_max"]
    refuses(write_hub(tmp_path, BD3LM, tensors), "misses tensor 'sampling_eps_max'")
    del tensors["sampling_eps_min"]
    loaded = load_published(write_hub(tmp_path, {**BD3LM, "var_min": False}, tensors))
    assert loaded.schedule == ScheduleSpec()
    plain = network(time_input="none", attention="full")
    loaded = load_published(
        write_hub(
            tmp_path, {**BD3LM, "adaln": False, "cross_attn": False}, state(plain, "backbone.")
        )
    )
    assert_same(loaded.network, plain)


@pytest.mark.parametrize("by_file", [False, True], ids=["folder", "file"])
def test_sedd_in_training_takes_the_averaged_weights(tmp_path: Path, by_file: bool) -> None:
    raw, net = network(seed=1, scale_by_sigma=True), network(scale_by_sigma=True)
    name = "checkpoints-meta/checkpoint.pth"
    content = {
        "model": state(raw),
        "ema": averaged(net),
        "step": 9,
        "optimizer": {"state": {0: "ignored"}},
    }
    run = write_run(tmp_path, SEDD, name, content)
    loaded = load_published(run / name if by_file else run)
    assert_same(loaded.network, net)
    assert loaded.family == "sedd"
    del content["ema"]
    refuses(write_run(tmp_path, SEDD, name, content), "misses 'ema'")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["mdlm", "bd3lm"])
def test_lightning_takes_the_averaged_weights(tmp_path: Path, family: str, compiled: bool) -> None:
    more = {"attention": "block_causal", "block_size": 4} if family == "bd3lm" else {}
    raw, net = network(seed=1, time_input="zero", **more), network(time_input="zero", **more)
    prefix = "backbone._orig_mod." if compiled else "backbone."
    content: dict[str, Any] = {
        "state_dict": state(raw, prefix),
        "ema": averaged(net),
        "global_step": 3,
    }
    config = MDLM_RUN
    if family == "bd3lm":
        config = BD3LM_RUN
        content["state_dict"] |= {
            key: torch.tensor(0.5) for key in ("sampling_eps_min", "sampling_eps_max")
        }
    loaded = load_published(write_run(tmp_path, config, "checkpoints/last.ckpt", content))
    assert_same(loaded.network, net)
    assert (loaded.family, loaded.prediction) == (family, "logits")
    del content["ema"]  # training.ema=0 writes none
    assert_same(
        load_published(write_run(tmp_path, config, "checkpoints/last.ckpt", content)).network, raw
    )


def test_lightning_with_its_config_inside(tmp_path: Path) -> None:
    """Plain hyperparameters, and MDLM's code trained as SEDD: its score is scaled by σ."""
    config = {**MDLM_RUN, "parameterization": "sedd", "time_conditioning": True}
    net = network(scale_by_sigma=True)
    content = {"state_dict": state(net, "backbone."), "hyper_parameters": {"config": config}}
    torch.save(content, tmp_path / "last.ckpt")
    loaded = load_published(tmp_path / "last.ckpt")
    assert_same(loaded.network, net)
    assert (loaded.family, loaded.prediction) == ("mdlm", "log_score")
    del content["hyper_parameters"]
    torch.save(content, tmp_path / "last.ckpt")
    refuses(tmp_path / "last.ckpt", "put its config.json or .hydra/config.yaml next to it")
    (tmp_path / "config.json").write_text(json.dumps({**MDLM, "parameterization": "sedd"}))
    assert load_published(tmp_path / "last.ckpt").prediction == "log_score"


# ---- traps ----


def test_averaged_weights_with_buffers_counted_are_refused(tmp_path: Path) -> None:
    net = network(scale_by_sigma=True)
    name = "checkpoints-meta/checkpoint.pth"
    for shadow in (list(state(net).values()), averaged(net)["shadow_params"][:-1]):
        run = write_run(
            tmp_path, SEDD, name, {"model": state(net), "ema": {"shadow_params": shadow}}
        )
        says = refuses(
            run, f"shadow_params holds {len(shadow)} tensors, but the network has 30 parameters"
        )
        assert "rotary_emb.inv_freq" in says
    shadow = averaged(net)["shadow_params"]
    shadow[5], shadow[6] = shadow[6], shadow[5]
    run = write_run(tmp_path, SEDD, name, {"model": state(net), "ema": {"shadow_params": shadow}})
    refuses(
        run, r"shadow_params\[5\] has shape \(48, 16\), expected \(16,\) of blocks.0.norm1.weight"
    )
    run = write_run(tmp_path, SEDD, name, {"model": state(net), "ema": {"shadow_params": None}})
    refuses(run, "shadow_params must be a list of tensors")


def _put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t: t.pop("blocks.1.attn_out.weight"),
            r"misses tensor 'blocks.1.attn_out.weight' of shape \(16, 16\)",
        ),
        (
            _put("output_layer.linear.bias", torch.zeros(12)),
            r"output_layer.linear.bias has shape \(12,\), expected \(11,\)",
        ),
        (
            _put("blocks.2.norm1.weight", torch.zeros(16)),
            "has an unknown tensor 'blocks.2.norm1.weight'",
        ),
        (
            lambda t: t.pop("vocab_embed.embedding"),
            "no tensor 'vocab_embed.embedding'.*sedd, mdlm, radd, bd3lm",
        ),
        (
            _put("blocks.0.norm2.weight", torch.full((16,), torch.nan)),
            "blocks.0.norm2.weight holds values",
        ),
        (
            _put("rotary_emb.inv_freq", torch.tensor([1.0, 0.2, 0.1, 0.01])),
            "is not that of base 10000",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], says: str
) -> None:
    tensors = state(network(scale_by_sigma=True))
    change(tensors)
    refuses(write_hub(tmp_path, SEDD, tensors), says)


# ---- what is saved ----

KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sedd", {"scale_by_sigma": True}, {}),
    ("sedd", {"scale_by_sigma": True}, {"schedule": ScheduleSpec("geometric", 1e-3, 9.0)}),
    ("sedd", {"scale_by_sigma": True, "attention": "prefix_causal"}, {}),
    ("radd", {"time_input": "none", "norm_bias": True}, {}),
    ("mdlm", {"time_input": "zero"}, {"mask_id": 4}),
    ("mdlm", {"attention": "prefix_causal", "scale_by_sigma": True, "dropout": 0.0}, {}),
    ("mdlm", {"time_input": "zero", "attention": "block_causal", "block_size": 2}, {}),
    (
        "bd3lm",
        {"time_input": "zero", "attention": "block_causal", "block_size": 4},
        {"schedule": ScheduleSpec(mask_rates=(0.5, 0.75))},
    ),
    ("bd3lm", {"time_input": "none", "attention": "full"}, {}),
]


@pytest.mark.parametrize(("family", "changes", "options"), KINDS)
def test_round_trip(
    tmp_path: Path, family: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    net = network(**changes)
    save_published(net, tmp_path / "a", family, **options)
    loaded = load_published(tmp_path / "a")
    assert_same(loaded.network, net)
    assert loaded.family == family
    assert loaded.schedule == options.get("schedule", ScheduleSpec())
    assert loaded.mask_id == options.get("mask_id", 10)
    save_published(
        loaded.network,
        tmp_path / "b",
        family,
        schedule=loaded.schedule,
        mask_id=loaded.mask_id,
    )
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("family", "config"), [("sedd", SEDD), ("mdlm", MDLM), ("bd3lm", BD3LM), ("radd", RADD)]
)
def test_what_is_written_is_the_published_layout(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    """Every published key that says something about the network comes back with its published value."""
    changes: dict[str, Any] = {
        "sedd": {"scale_by_sigma": True},
        "mdlm": {"time_input": "zero"},
        "bd3lm": {"time_input": "zero", "attention": "block_causal", "block_size": 4},
        "radd": {"time_input": "none", "norm_bias": True},
    }[family]
    net = network(**changes)
    schedule = ScheduleSpec(mask_rates=(0.001, 0.999)) if family == "bd3lm" else None
    save_published(net, tmp_path, family, schedule=schedule)
    written = json.loads((tmp_path / "config.json").read_text())
    about_training = {"ngpus", "file", "name", "length", "dtype"}

    def compare(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        for key in theirs.keys() - about_training:
            if isinstance(theirs[key], dict):
                compare(mine[key], theirs[key])
            else:
                assert mine[key] == theirs[key], key

    compare(written, config)
    names = set(load_file(str(tmp_path / "model.safetensors")))
    prefix = "" if family in ("sedd", "radd") else "backbone."
    expected = set(state(net, prefix)) | (
        {"sampling_eps_min", "sampling_eps_max"} if family == "bd3lm" else set()
    )
    assert names == expected
    assert not {"attention"} & written.keys()
