"""What a GGUF file says of caps, norms, windows and rotary positions is the model's; no tensor is dropped."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specalign.common.errors import UserError
from specalign.gguf.convert import complete_config
from specalign.gguf.header import Header
from specalign.lm.loading import load_target
from tests.gguf_layouts import LAYOUTS, write_layout
from tests.target_models import (
    add_piece_tokenizer,
    needs_recent,
    piece_fields,
    tensor_names,
    tiny_config,
    tiny_model,
    write_out,
)

VOCAB = len(piece_fields()["tokenizer.ggml.tokens"])
TOKENS = torch.randint(
    4, VOCAB, (1, 60), generator=torch.Generator().manual_seed(9)
)  # longer than the window
USUAL = {"rope_type": "default", "rope_theta": 1e4}
ARCHITECTURES = {"gemma2": "gemma2", "gemma3": "gemma3_text", **LAYOUTS}
HALF = {**USUAL, "partial_rotary_factor": 0.5}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "cache"))


def model_of(architecture: str, monkeypatch: pytest.MonkeyPatch, **values: Any) -> Any:
    config = tiny_config(ARCHITECTURES.get(architecture, architecture), VOCAB)
    if hasattr(config, "query_pre_attn_scalar"):
        config.attn_logit_softcapping = config.final_logit_softcapping = None
    for name, value in values.items():
        setattr(config, name, value)
    monkeypatch.setattr("tests.target_models.tiny_config", lambda *_: config)
    return tiny_model(config.model_type, VOCAB)


def write(
    path: Path,
    model: Any,
    architecture: str,
    tensors: dict[str, Tensor] | None = None,
    **values: Any,
) -> Path:
    """Keys with dots are written with __; a tensor of no dimension is left out."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_kv_heads", None) or config.num_key_value_heads)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(
        getattr(config, "ffn_hidden_size", None) or config.intermediate_size
    )
    writer.add_context_length(512)
    writer.add_rope_freq_base(10000.0)
    gemma = architecture.startswith("gemma")
    if gemma:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(config.head_dim)
    for key, value in values.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key.replace('__', '.')}", value)
    add_piece_tokenizer(writer)
    names = tensor_names(architecture, config.num_hidden_layers)
    stored = {
        f"{names.get_name(name.rpartition('.')[0])}.{name.rpartition('.')[2]}": tensor
        + (gemma and "norm" in name)
        for name, tensor in model.state_dict().items()
        if "experts" not in name and (name != "lm_head.weight" or not config.tie_word_embeddings)
    }
    for name, tensor in {**stored, **(tensors or {})}.items():
        if tensor.dim():
            writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    write_out(writer)
    return path


@pytest.mark.parametrize(
    ("architecture", "of_model", "of_file"),
    [
        ("gemma2", {}, {}),
        ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 4, "final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
        ("falcon", {"layer_norm_epsilon": 0.3, "num_kv_heads": 1}, {"attention__layer_norm_epsilon": 0.3}),
        ("starcoder2", {"sliding_window": 24}, {"attention__layer_norm_epsilon": 1e-5, "attention__sliding_window": 24}),
        pytest.param("phi3", {"sliding_window": 24, "pad_token_id": 0}, {"attention__layer_norm_rms_epsilon": 1e-5, "attention__sliding_window": 24, "rope__dimension_count": 16}, marks=needs_recent),
    ],
)  # fmt: skip
def test_what_the_file_says_is_the_models(
    architecture: str,
    of_model: dict[str, Any],
    of_file: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Phi-3's padding is the class's, beyond a small vocabulary."""
    if architecture == "gemma2":  # the reader's own where the file says nothing
        of_model = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **of_model}
    own = model_of(architecture, monkeypatch, **of_model)
    if architecture.startswith("gemma"):
        of_file = {"attention__sliding_window": 24, **of_file}
    target = load_target(
        str(write(tmp_path / "m.gguf", own, architecture, **of_file)), "float32", "cpu"
    )
    found = target.forward(TOKENS).logits_BLV
    torch.testing.assert_close(found, own(TOKENS).logits, rtol=1e-4, atol=1e-4)


def completed(architecture: str, config: Any, **values: Any) -> Any:
    """The config completed by a header of a model with heads of 16."""
    own = {"attention__head_count": 4, "embedding_length": 64, **values}
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in own.items()}
    tensors: dict[str, Any] = {"token_embd.weight": SimpleNamespace(shape=(64, VOCAB))}
    complete_config(
        Path("m.gguf"), Header({"general.architecture": architecture, **named}, tensors), config
    )
    return config


@pytest.mark.parametrize(("layers", "scalar"), [(46, 32), (26, 16)])
def test_the_27b_scales_its_scores_by_the_width_per_head(layers: int, scalar: int) -> None:
    config = tiny_config("gemma2", VOCAB)
    config.num_hidden_layers, config.num_attention_heads = layers, 2
    assert completed("gemma2", config, attention__key_length=16).query_pre_attn_scalar == scalar


@pytest.mark.parametrize(
    ("kind", "width", "scale"), [("starcoder2", 16, 4.0), ("stablelm", 8, 4.0), ("phi3", 8, 1.0)]
)
def test_rotary_base_scale_and_width_are_the_files(kind: str, width: int, scale: float) -> None:
    values = {"rope__freq_base": 999999.4375, "rope__dimension_count": width}
    values["rope__scaling__factor"] = scale
    found = frequencies(completed(kind, tiny_config(kind, VOCAB), **values))["inv_freq"]
    torch.testing.assert_close(found, usual(width, 999999.4375) / scale)


def test_gemma_3_scales_its_full_layers_alone() -> None:
    config = tiny_config("gemma3_text", VOCAB)
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    values = {"rope__freq_base": 1e6, "rope__scaling__factor": 8.0, "rope__freq_base_swa": 2e4}
    found = frequencies(completed("gemma3", config, attention__sliding_window=24, **values))
    torch.testing.assert_close(found["full_attention_inv_freq"], usual(16, 1e6) / 8)
    torch.testing.assert_close(found["sliding_attention_inv_freq"], usual(16, 2e4))


def test_a_rotary_width_without_a_config_key_is_refused() -> None:
    with pytest.raises(UserError, match="dimension_count=8: partial rotary width of 16"):
        completed("starcoder2", tiny_config("starcoder2", VOCAB), rope__dimension_count=8)


def frequencies(config: Any) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_config(config)
    return {n.rpartition(".")[2]: b for n, b in model.named_buffers() if n.endswith("inv_freq")}


def usual(width: int, base: float) -> Tensor:
    return base ** -(torch.arange(0, width, 2) / width)


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("qwen2moe", {"layer_types": ["full_attention"] * 4, "norm_topk_prob": False}),
        pytest.param("minimax-m2", {"rope_parameters": HALF}, marks=needs_recent),
        pytest.param("lfm2", {}, marks=needs_recent),
        ("qwen35", {"rope_parameters": {**HALF, "mrope_section": [2, 1, 1]}}),
        pytest.param(
            "qwen35moe",
            {"rope_parameters": {**HALF, "mrope_section": [2, 1, 1]}},
            marks=needs_recent,
        ),
    ],
)
def test_layouts_of_experts_and_states_are_the_models(
    architecture: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = model_of(architecture, monkeypatch, **values)
    target = load_target(
        str(write_layout(tmp_path / "m.gguf", own, architecture)), "float32", "cpu"
    )
    found = target.forward(TOKENS).logits_BLV
    torch.testing.assert_close(found, own(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"blk.3.attn_k.weight": torch.tensor(0)}, r"lacks 'model\.layers\.3\.self_attn\.k_proj\.weight' of a gemma2 model"),
        ({"blk.0.attn_q_norm.weight": torch.ones(16)}, "contains 141,776 weights, but the gemma2 model built from it has 141,760"),
        ({"blk.0.ffn_up.weight": torch.ones(80, 64)}, r"lacks 'model\.layers\.0\.mlp\.up_proj\.weight'.* or has it in a"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_missing_or_would_be_left_out_is_refused(
    tensors: dict[str, Tensor], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader would continue with random weights, or without the tensor."""
    own = model_of("gemma2", monkeypatch)
    path = write(tmp_path / "m.gguf", own, "gemma2", tensors, attention__sliding_window=24)
    with pytest.raises(UserError, match=says):
        load_target(str(path), "float32", "cpu")


def test_experts_have_the_files_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3's of 235B are not as wide as those of 30B, which the reader takes for all."""
    own = model_of("qwen3_moe", monkeypatch, norm_topk_prob=True)
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(own.model.layers):
        parts = (*layer.mlp.experts.gate_up_proj.data.chunk(2, 1), layer.mlp.experts.down_proj.data)
        named = zip(("gate", "up", "down"), parts, strict=True)
        tensors |= {f"blk.{i}.ffn_{name}_exps.weight": part for name, part in named}
    of_file: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}
    of_file |= {"expert_feed_forward_length": 32, "attention__key_length": 16}
    of_file["attention__layer_norm_rms_epsilon"] = 1e-6
    path = write(tmp_path / "m.gguf", own, "qwen3moe", tensors, **of_file)
    found = load_target(str(path), "float32", "cpu").forward(TOKENS).logits_BLV
    torch.testing.assert_close(found, own(TOKENS).logits, rtol=1e-4, atol=1e-4)
