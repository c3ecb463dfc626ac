"""Exports draft what was trained, and every planted fault is named at its rung with its cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.checkpoints.block import load_drafter
from align.target.inspection.parts import embedding_scale, embeds_rows
from align.target.model import Target
from decode.drafters.block import BlockProposer
from decode.engine.compiled import stock_model
from decode.engine.decoder import Decoder
from decode.exporting.base import as_served
from decode.exporting.engine_reader import TransformersReader
from decode.exporting.folder import EMBEDDING
from decode.exporting.ladder import climb, replay
from decode.exporting.reader import RUNGS, FilesReader
from decode.exporting.registry import FORMATS
from tests.builders import PROMPT, block_network, overfit_block_network
from tests.target_models import tiny_model, tiny_target

FILL_IN = {"block_layout": "fill_in"}


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    return stock_model(target)


def drafter_for(target: Target, format_name: str, whole: bool = True, **options: Any) -> BlockDrafter:
    layout = {} if format_name == "dspark" else FILL_IN
    return block_network(target, "taps", whole=whole, options={**layout, **options})


@pytest.mark.parametrize(
    ("format_name", "whole", "options"),
    [
        ("dflash", True, {}),
        ("dflash", False, {}),
        ("speculators", True, {}),
        ("speculators", False, {}),
        ("transformers", True, {}),
        ("dspark", True, {}),
        ("dspark", False, {"markov_rank": 8, "markov": "vanilla", "confidence_head": True}),
        ("dspark", True, {"markov_rank": 8, "markov": "linear"}),
        ("dspark", True, {"markov_rank": 8, "markov": "tanh", "confidence_head": True}),
        ("dspark", False, {"markov_rank": 8, "markov": "gated"}),
    ],
)
def test_an_export_drafts_what_was_trained(
    tmp_path: Path, target: Target, model: Any, format_name: str, whole: bool, options: dict[str, Any]
) -> None:
    drafter = drafter_for(target, format_name, whole, **options)
    FORMATS[format_name].write(drafter, tmp_path / "out", torch.float32, "card\n")
    reader = FORMATS[format_name].readers[0](tmp_path / "out", model)
    made = FORMATS[format_name].make(drafter)
    rungs = climb(as_served(drafter, made, reader), made, reader, PROMPT)
    assert all(rung.same for rung in rungs), [r.line for r in rungs]
    wanted = [r for r in RUNGS if r != "mask" or isinstance(reader, FilesReader)] + ["settings and tensors"]
    assert [rung.name for rung in rungs] == wanted


@pytest.mark.parametrize(
    ("format_name", "options"),
    [("dflash", {}), ("speculators", {}), ("transformers", {}), ("dspark", {"markov_rank": 8, "markov": "vanilla"})],
)  # fmt: skip
def test_a_target_that_scales_its_embedding(
    tmp_path: Path, format_name: str, options: dict[str, Any]
) -> None:
    """Gemma's: what engines read as they stand is written scaled, in digits that lose nothing; and it comes in again as it went out."""
    gemma = tiny_target("gemma3_text")
    assert embedding_scale(gemma) == 8 and embeds_rows(gemma)
    drafter, form = drafter_for(gemma, format_name, **options), FORMATS[format_name]
    drafter.to(torch.bfloat16).float()
    made = form.write(drafter, tmp_path / "out", torch.bfloat16, "")
    model = tiny_model("gemma3_text", gemma.vocab_size)
    rungs = climb(drafter, form.make(drafter), form.readers[0](tmp_path / "out", model), PROMPT)
    assert all(rung.same for rung in rungs), [r.line for r in rungs]
    assert torch.equal(load_drafter(tmp_path / "out", gemma).fc.weight, drafter.fc.weight)
    if format_name == "transformers":  # which asks the target's own embedding
        return
    path = tmp_path / "out" / "model.safetensors"
    held = load_file(path)
    assert held[EMBEDDING].dtype == torch.float32 and "by 8: the rows" in " ".join(made.notes)
    assert any("its activation is gelu_pytorch_tanh: vLLM and SGLang" in note for note in made.notes)
    assert any("no hidden states of Gemma3ForCausalLM" in note for note in made.notes)
    torch.testing.assert_close(held[EMBEDDING], gemma.embedding_VD * 8)
    reader = FilesReader(tmp_path / "out", model)  # engines read the folder's own rows first
    reader.tensors[EMBEDDING] = reader.tensors[EMBEDDING] / 8
    last = climb(drafter, form.make(drafter), reader, PROMPT)[-1]
    assert last.name == "hidden states" and not last.same
    del held[EMBEDDING]
    save_file(held, path)
    last = climb(drafter, form.make(drafter), FilesReader(tmp_path / "out", model), PROMPT)[-1]
    assert not last.same and (last.name == "hidden states") is (format_name == "speculators")
    if format_name == "speculators":
        with pytest.raises(UserError, match="embeddings times 1; target .* multiplies them by 8"):
            load_drafter(tmp_path / "out", gemma)


def test_a_target_that_norms_its_embedding_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_for(target, "dflash")
    own = target.embed
    monkeypatch.setattr(target, "embed", lambda tokens: F.normalize(own(tokens), dim=-1))
    for name in ("dflash", "speculators", "transformers"):
        with pytest.raises(UserError, match=f"--format {name}: its target .* norms embeddings"):
            FORMATS[name].make(drafter)


@pytest.mark.parametrize("format_name", ["dflash", "transformers"])
def test_whole_outputs_accept_what_the_decoder_accepts(
    tmp_path: Path, target: Target, model: Any, format_name: str
) -> None:
    drafter = overfit_block_network(target, PROMPT)
    FORMATS[format_name].write(drafter, tmp_path / "out", torch.float32, "")
    reader = FORMATS[format_name].readers[0](tmp_path / "out", model)
    ours = Decoder(target, BlockProposer(drafter, tree_nodes=0)).generate(PROMPT, max_new_tokens=24)
    assert replay(reader, PROMPT, ours.tokens) == ours.accepted and len(set(ours.accepted)) > 2
    if isinstance(reader, TransformersReader):
        assert reader.generate(PROMPT, 24) == (ours.tokens, ours.accepted)


# ---- planted faults ----

Fault = Callable[[dict[str, Any], dict[str, Tensor]], None]


def _set(**values: Any) -> Fault:
    def plant(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.update(values)
        nested = config.get("dflash_config", {})
        nested.update({k: v for k, v in values.items() if k in nested})

    return plant


def _layers_later(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    key = "aux_hidden_state_layer_ids" if "aux_hidden_state_layer_ids" in config else "target_layer_ids"
    config[key] = [i + 1 for i in config[key]]
    if "dflash_config" in config:
        config["dflash_config"][key] = config[key]


def _theta(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    inner = config.get("transformer_layer_config", config)
    inner["rope_theta"] = inner["rope_parameters"]["rope_theta"] = 17.0


def _scaled(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Fast pairs as they are, slow ones at an eighth, as in Llama 3.1."""
    config["rope_parameters"] |= {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config["rope_parameters"]["original_max_position_embeddings"] = 64


def _linear(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 4.0}


def _partial(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config.get("transformer_layer_config", config)["rope_parameters"]["partial_rotary_factor"] = 0.5


def _mask_token(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    _set(mask_token_id=config["mask_token_id"] + 1)(config, tensors)


def _no_theta(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Engines then take a base of their own; transformers' class fills it in, in the dict that it is given."""
    del config.get("transformer_layer_config", config)["rope_parameters"]["rope_theta"]


def _flat_theta(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["rope_theta"] = 17.0


def _width(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config.get("transformer_layer_config", config)["head_dim"] *= 2


def _rows(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["block_size"] -= 1


def _shifted(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))  # tokens, where offsets belong


def _bias(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    inner = config.get("transformer_layer_config", config)
    inner["attention_bias"] = True
    for i in range(inner["num_hidden_layers"]):
        for part in "qkvo":
            name = f"layers.{i}.self_attn.{part}_proj"
            tensors[f"{name}.bias"] = torch.zeros(tensors[f"{name}.weight"].shape[0])
    tensors["layers.0.self_attn.k_proj.bias"].normal_(generator=torch.Generator().manual_seed(0))


def _heads(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["num_attention_heads"] = 1


def _nan(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][0] = torch.nan


def _confidence(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["markov_head.markov_w1.weight"][-1] += 1  # a token that no draft reads


def _norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["hidden_norm.weight"] = tensors["hidden_norm.weight"] * 1.5


def _markov(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["markov_head.markov_w1.weight"] = tensors["markov_head.markov_w1.weight"].roll(1, 0)


def _later(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] - (tensors["d2t"] > 0).long()


FILES = ("dflash", "speculators", "dspark")
ALL = (*FILES, "transformers")
FAULTS: list[tuple[str, str, Fault, str, str]] = [
    ("dflash", "layer ids", _layers_later, "tapped features", "target_layer_ids are off by 1"),
    (
        "speculators",
        "layer ids",
        _layers_later,
        "tapped features",
        "aux_hidden_state_layer_ids are off by 1",
    ),
    ("transformers", "layer ids", _layers_later, "tapped features", "target_layer_ids are off by 1"),
    ("dflash", "rope_theta", _theta, "rotary tables", "rope_theta: 17 is read, "),
    ("transformers", "rope_theta", _theta, "rotary tables", "rope_theta: 17 is read, "),
    (
        "dflash",
        "rope_type",
        _scaled,
        "rotary tables",
        "rope_type, factor, …): the fastest pair turns 1 and the slowest 0.125",
    ),
    ("transformers", "rope_type", _linear, "rotary tables", "turns 0.25 and the slowest 0.25"),
    *(
        (f, "no rope_theta", _no_theta, "settings and tensors", "rope_parameters.rope_theta is missing")
        for f in ("speculators", "dspark")
    ),
    ("dflash", "partial rotary", _partial, "rotary tables", "partial_rotary_factor"),
    ("dflash", "mask id", _mask_token, "block", "mask_token_id"),
    ("transformers", "mask id", _mask_token, "block", "mask_token_id"),
    ("dflash", "layout: rows", _rows, "block", "block layout"),
    ("speculators", "layout", _set(sample_from_anchor=True), "block", "sample_from_anchor"),
    ("dspark", "layout", _set(sample_from_anchor=False), "block", "sample_from_anchor"),
    ("dflash", "causal", _set(is_causal=True), "mask", "causal flag"),
    ("speculators", "d2t", _shifted, "draft tokens", "d2t"),
    ("dspark", "d2t", _later, "draft logits", "tensor d2t"),
    *((f, "no token", _set(mask_token_id=99999), "block", "mask_token_id: token 99999") for f in ALL),
    *((f, "head_dim", _width, "rotary tables", "head_dim: tables of width 32, 16") for f in FILES),
    *((f, "bias", _bias, "hidden states", "layers.0.self_attn.k_proj.bias") for f in FILES),
    ("dflash", "a norm", _norm, "fused context", "hidden_norm.weight"),
    ("dflash", "head count", _heads, "settings and tensors", "num_attention_heads is 1"),
    *(
        (
            f,
            "partial rotary in the files",
            _partial,
            "settings and tensors",
            "rope_parameters.partial_rotary_factor is 0.5, an",
        )
        for f in ALL
    ),
    (
        "speculators",
        "flat rope_theta",
        _flat_theta,
        "settings and tensors",
        "transformer_layer_config.rope_theta is 17.0, an",
    ),
    ("dflash", "no number", _nan, "hidden states", "tensor norm.weight"),
    ("dspark", "a row that is not read", _confidence, "settings and tensors", "markov_head.markov_w1.weight"),
    ("dspark", "a Markov table", _markov, "draft logits", "markov_head.markov_w1.weight"),
]


@pytest.mark.parametrize(
    ("format_name", "fault", "plant", "rung", "cause"), FAULTS, ids=[f"{f[0]}, {f[1]}" for f in FAULTS]
)
def test_a_planted_fault_is_named(
    tmp_path: Path,
    target: Target,
    model: Any,
    format_name: str,
    fault: str,
    plant: Fault,
    rung: str,
    cause: str,
) -> None:
    markov = {"markov_rank": 8, "markov": "vanilla"} if format_name == "dspark" else {}
    drafter = drafter_for(target, format_name, whole=fault != "d2t", **markov)
    out = tmp_path / "out"
    FORMATS[format_name].write(drafter, out, torch.float32, "")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    plant(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    reader = FORMATS[format_name].readers[0](out, model)
    if fault == "partial rotary":  # in a reader that heeds it, which Qwen3's module does not
        _turn_half(reader)
    rungs = climb(drafter, FORMATS[format_name].make(drafter), reader, PROMPT)
    assert [r.same for r in rungs] == [True] * (len(rungs) - 1) + [False]
    assert rungs[-1].name == rung and cause in rungs[-1].cause, rungs[-1].line


def _turn_half(reader: Any) -> None:
    tables = reader._tables

    def half(count: int) -> tuple[Tensor, Tensor]:
        cos, sin = tables(count)
        quarter = cos.shape[-1] // 4
        for table, still in ((cos, 1.0), (sin, 0.0)):
            table[:, quarter : 2 * quarter] = still
            table[:, 3 * quarter :] = still
        return cos, sin

    reader._tables = half
