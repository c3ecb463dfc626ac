"""Rotary positions of a GGUF file are the model's: base, scale, and how much of a head is turned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from align.common.errors import UserError
from align.gguf.fitting import check_fits
from align.gguf.header import Header
from align.gguf.positions import scale, take_positions
from tests.target_models import tiny_config

FILE = Path("m.gguf")


def header(architecture: str, *tensors: str, **values: Any) -> Header:
    """Of a model with heads of 16; keys with dots are written with __."""
    own = {"attention__head_count": 4, "embedding_length": 64, **values}
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in own.items()}
    shapes: Any = {"token_embd.weight": (260, 64), **dict.fromkeys(tensors, (8,))}
    return Header({"general.architecture": architecture, **named}, {}, shapes, {})


def tables(config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The frequencies of the model that the saved config makes."""
    config.save_pretrained(folder)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {n.rpartition(".")[2]: b for n, b in model.named_buffers() if n.endswith("inv_freq")}


def usual(width: int, base: float) -> torch.Tensor:
    return base ** -(torch.arange(0, width, 2) / width)


@pytest.mark.parametrize(
    ("kind", "width", "scale"), [("starcoder2", 16, 4.0), ("stablelm", 8, 4.0), ("phi3", 8, 1.0)]
)
def test_base_scale_and_width_are_the_files(kind: str, width: int, scale: float, tmp_path: Path) -> None:
    config = tiny_config(kind, 260)
    given = header(
        kind, rope__freq_base=999999.4375, rope__dimension_count=width, rope__scaling__factor=scale
    )
    check_fits(FILE, given)
    take_positions(FILE, given, config)
    found = tables(config, tmp_path)["inv_freq"]
    torch.testing.assert_close(found, usual(width, 999999.4375) / scale)


def test_gemma_3_scales_its_full_layers_alone(tmp_path: Path) -> None:
    config = tiny_config("gemma3_text", 260)
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    given = header(
        "gemma3", rope__freq_base=1e6, rope__scaling__type="linear", rope__scaling__factor=8.0,
        rope__freq_base_swa=2e4, rope__dimension_count=8,
    )  # fmt: skip
    take_positions(FILE, given, config)
    found = tables(config, tmp_path)
    torch.testing.assert_close(found["full_attention_inv_freq"], usual(16, 1e6) / 8)
    torch.testing.assert_close(found["sliding_attention_inv_freq"], usual(16, 2e4))


def test_a_scale_without_a_type_is_linear_and_may_have_its_older_key() -> None:
    assert scale(header("llama")) == 1 and scale(header("llama", rope__scaling__factor=0.0)) == 1
    assert scale(header("llama", rope__scaling__factor=4.0)) == 4
    assert scale(header("llama", rope__scale_linear=2.0)) == 2
    assert scale(header("llama", rope__scale_linear=2.0, rope__scaling__factor=4.0)) == 4
    assert scale(header("llama", rope__scaling__type="none", rope__scaling__factor=4.0)) == 1


def test_nothing_said_changes_nothing() -> None:
    for kind in ("gemma3_text", "gpt2"):
        config = tiny_config(kind, 260)
        take_positions(FILE, header(kind), config)
        assert config.to_dict() == tiny_config(kind, 260).to_dict()


def test_what_cannot_be_taken_is_refused_from_the_header() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    with pytest.raises(UserError, match=r"qwen3moe.rope.scaling.type='?yarn'?: .*hub layout"):
        check_fits(FILE, header("qwen3moe", **yarn))
    for tensor in ("rope_factors_long.weight", "rope_freqs.weight"):
        with pytest.raises(UserError, match=f"tensor '{tensor}': .* of 'phi3'"):
            check_fits(FILE, header("phi3", tensor))
    config = tiny_config("starcoder2", 260)
    with pytest.raises(UserError, match=r"starcoder2.rope.dimension_count=8: heads are 16 wide"):
        take_positions(FILE, header("starcoder2", rope__dimension_count=8), config)
