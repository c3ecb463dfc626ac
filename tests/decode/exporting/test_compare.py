"""Planted faults in exported folders are found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.engine.stock import stock_model
from decode.exporting import exports
from decode.exporting.exports import ExportVerdict, GreedyText, compare_export
from decode.exporting.formats import write_export
from specalign.lm.model import Target
from tests.builders import PROMPT, block_network

Fault = Callable[[dict[str, Any], dict[str, Tensor]], None]
TEXT = GreedyText(PROMPT, [5, 9, 3])


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    return stock_model(target)


def _set(section: str = "", **values: Any) -> Fault:
    return lambda config, tensors: (config[section] if section else config).update(values)


def _scale(name: str, factor: float = 1.5) -> Fault:
    return lambda config, tensors: tensors.update({name: tensors[name] * factor})


def _theta(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 17.0


def _d2t(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] - (tensors["d2t"] > 0).long()


FAULTS: list[tuple[str, str, Fault]] = [
    ("dflash", "rope_theta", _theta),
    ("dflash", "mask token", _set("dflash_config", mask_token_id=5)),
    ("dflash", "causal", _set(is_causal=True)),
    ("dflash", "context norm", _scale("hidden_norm.weight")),
    ("transformers", "second layer", _scale("layers.1.mlp.up_proj.weight")),
    ("dflash", "no number", _scale("norm.weight", torch.nan)),
    ("dspark", "Markov", _scale("markov_head.markov_w1.weight", -1.0)),
    ("dspark", "d2t", _d2t),
]


@pytest.mark.parametrize(
    ("name", "fault", "plant"), FAULTS, ids=[f"{f[0]}, {f[1]}" for f in FAULTS]
)
def test_a_planted_fault_is_found(
    tmp_path: Path, target: Target, model: Any, name: str, fault: str, plant: Fault
) -> None:
    """By the contents, and where those can be read by what they compute."""
    dspark = name == "dspark"
    options = {"markov_rank": 8, "markov": "vanilla"} if dspark else {"block_layout": "fill_in"}
    drafter = block_network(target, "taps", whole=fault != "d2t", options=options)
    out, generator = tmp_path / "out", torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():  # so that every part has an effect
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    write_export(name, drafter, out, torch.float32, "")
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    plant(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    verdict = ExportVerdict(name, out)
    compare_export(drafter, verdict, [TEXT], model)
    assert verdict.exit_code == 1 and verdict.conclusion == "NOT THE SAME DRAFTER"
    assert "DIFFERENT: " in verdict.lines[0] or "non-finite" in verdict.lines[0], verdict.lines
    unread = len(verdict.lines) == 1 or fault in ("d2t", "causal")
    assert unread or " DIFFERENT (rel" in verdict.lines[1]


def test_files_that_cannot_be_read(tmp_path: Path, target: Target) -> None:
    drafter = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    write_export("dflash", drafter, tmp_path / "out", torch.float32, "")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    compare_export(drafter, verdict := ExportVerdict("dflash", tmp_path / "out"), [TEXT])
    assert verdict.exit_code == 1 and "model.safetensors: not readable" in verdict.lines[0]


def test_code_in_a_folder_is_not_run(tmp_path: Path, model: Any) -> None:
    config = {
        "model_type": "other",
        "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\n")
    with pytest.raises(ValueError, match="custom code"):
        exports.open_assistant(tmp_path, model)
    assert not (tmp_path / "ran").exists()
