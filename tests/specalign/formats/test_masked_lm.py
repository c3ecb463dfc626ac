"""Folders of masked-diffusion language models: published names, mask ids, broken files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specalign.common.errors import UserError
from specalign.formats.masked_lm import load_masked_lm, save_masked_lm
from tests.masked_lms import CONFIGS, DIFFULLAMA, small_masked_lm
from tests.masked_lms import partly_masked as tokens

QWEN_LAYER = (
    "input_layernorm.weight", "mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "post_attention_layernorm.weight", "self_attn.k_proj.weight", "self_attn.o_proj.weight", "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
)  # fmt: skip


PUBLISHED = {  # as the checkpoints have them: the layer's, then the rest
    "dream": (
        "model.layers.{i}.",
        (*QWEN_LAYER, "self_attn.k_proj.bias", "self_attn.q_proj.bias", "self_attn.v_proj.bias"),
        ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"),
    ),
    "diffullama": (
        "denoise_model.layers.{i}.", QWEN_LAYER, ("denoise_model.norm.weight", "embed_tokens.weight", "lm_head.weight"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_has_the_published_names_and_loads_again(name: str, tmp_path: Path) -> None:
    network = small_masked_lm(name)
    save_masked_lm(network, tmp_path)
    prefix, layer, rest = PUBLISHED[name]
    expected = {prefix.format(i=i) + part for i in range(2) for part in layer} | set(rest)
    held = load_file(str(tmp_path / "model.safetensors"))
    assert set(held) == expected
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIGS[name]
    loaded = load_masked_lm(tmp_path)
    assert (loaded.family.name, loaded.mask_token_id) == (name, 36)
    torch.testing.assert_close(loaded(tokens()), network(tokens()), atol=0, rtol=0)
    (tmp_path / "model.safetensors").unlink()
    torch.save(held, tmp_path / "pytorch_model.bin")
    assert torch.equal(load_masked_lm(tmp_path)(tokens()), network(tokens()))


BROKEN: list[tuple[str, Any, str]] = [
    ("denoise_model.layers.1.mlp.up_proj.weight", None, "missing tensor 'denoise_model.layers.1.mlp.up_proj.weight'"),
    ("denoise_model.extra", torch.zeros(1), "unknown tensor 'denoise_model.extra'"),
    ("denoise_model.layers.0.self_attn.o_proj.weight", torch.zeros(32, 31), "o_proj.weight has shape (32, 31), expected (32, 32)"),
    ("denoise_model.norm.weight", torch.full((32,), torch.nan), "norm.weight contains non-finite values"),
    ("config.json", {"model_type": "sdra", "architectures": []}, "model_type='sdra'"),
    ("config.json", {"mask_token_id": 40}, "mask_token_id=40 is not within 0..39"),
    ("config.json", {"hidden_size": "wide"}, "hidden_size"),
    ("config.json", {"tie_word_embeddings": True}, "'lm_head.weight' differs from the embedding that it is tied to"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "says"), BROKEN)
def test_broken_folders_say_why(tmp_path: Path, name: str, value: Any, says: str) -> None:
    save_masked_lm(small_masked_lm("diffullama"), tmp_path)
    if name == "config.json":
        (tmp_path / name).write_text(json.dumps({**DIFFULLAMA, **value}))
    else:
        tensors = {**load_file(tmp_path / "model.safetensors"), name: value}
        held = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        load_masked_lm(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_files_say_why(tmp_path: Path) -> None:
    save_masked_lm(small_masked_lm("diffullama"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"a": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="contains print objects besides tensors"):
        load_masked_lm(tmp_path)


def test_mask_ids_come_from_the_config_the_tokenizer_or_the_record(tmp_path: Path) -> None:
    config = {k: v for k, v in DIFFULLAMA.items() if k != "mask_token_id"}
    network = small_masked_lm("diffullama")
    network.source = config
    save_masked_lm(network, tmp_path)
    with pytest.raises(UserError, match=r"mask_token_id=811 is not within 0\.\.39"):
        load_masked_lm(tmp_path)
    added = {"38": {"content": "[M]"}, "39": {"content": "x"}}
    for named in ("[M]", {"content": "[M]"}):
        values = {"mask_token": named, "added_tokens_decoder": added}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        loaded = load_masked_lm(tmp_path)
        assert loaded.mask_token_id == 38
