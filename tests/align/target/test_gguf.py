"""A GGUF file becomes the hub's model: rotary order, names, tokenizer; made once."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from align.common.errors import UserError
from align.target.gguf import _KEYS, converted_folder
from align.target.loading import load_target
from align.target.model import Target

NAMES = {f"{ours}.weight": f"{theirs}.weight" for theirs, ours in _KEYS.items()}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The hub's half-split rotary rows as llama.cpp stores them."""
    return weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, target: Target, architecture: str = "llama", tokenizer: str = "gpt2") -> None:
    """The debug target as a GGUF file."""
    config, vocab = target.model.config, target.tokenizer.get_vocab()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(tokenizer)
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens[3] = "ab"  # instead of <unused>: a GGUF file has a merge
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(target.tokenizer.chat_template)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in target.model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name in TOP:
            stored = TOP[name]
        else:
            _, _, layer, part = name.split(".", 3)
            stored = f"blk.{layer}.{NAMES[part]}"
            projection = part.split(".")[-2]
            if projection in heads:
                weight = interleaved(weight, heads[projection])
        writer.add_tensor(stored, np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "cache"))
    return load_target("debug", fast=False)


def test_the_converted_model_is_the_model(plain: Target, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, plain)
    folder = converted_folder(path)
    changed = (folder / "config.json").stat().st_mtime_ns
    loaded = load_target(str(path), dtype="float32", fast=False)
    tokens = torch.arange(4, 30)[None]
    expected = plain.forward(tokens).logits_BLV
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, expected, atol=1e-5, rtol=1e-5)
    assert loaded.chat_tokens("Hello") == plain.chat_tokens("Hello")
    assert converted_folder(path) == folder and (folder / "config.json").stat().st_mtime_ns == changed


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "says"),
    [
        ("lama", "gpt2", "GGUF architecture 'lama' is not supported .did you mean 'llama'"),
        ("llama", "llama", "GGUF tokenizer 'llama' is not supported"),
    ],
)
def test_what_is_not_supported_leaves_nothing(
    plain: Target, tmp_path: Path, architecture: str, tokenizer: str, says: str
) -> None:
    write(tmp_path / "tiny.gguf", plain, architecture, tokenizer)
    with pytest.raises(UserError, match=says):
        converted_folder(tmp_path / "tiny.gguf")
    assert not list((tmp_path / "cache").glob("targets/*"))
