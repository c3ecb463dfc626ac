"""Drafters as GGUF files: what llama.cpp's definition computes with them is what was trained; faults are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

from align.common.errors import UserError
from align.models.checkpoints.block import load_drafter
from align.target.model import Target
from decode.engine.compiled import stock_model
from decode.exporting.gguf_file import FILE, gguf_name
from decode.exporting.gguf_reader import GGUFFileReader
from decode.exporting.ladder import climb
from decode.exporting.registry import FORMATS
from tests.builders import PROMPT, block_network
from tests.published_blocks import backbone, dflash_config, write
from tests.target_models import tiny_model, tiny_target

LAYOUT = {"block_layout": "fill_in"}
FILL_IN = {**LAYOUT, "markov_rank": 0}
MARKOV = {"markov_rank": 8, "markov": "vanilla"}


@pytest.mark.parametrize(
    ("whole", "options", "dtype"),
    [
        (True, FILL_IN, torch.bfloat16),
        (False, FILL_IN, torch.float32),
        (True, MARKOV, torch.float16),
        (False, {**MARKOV, "confidence_head": True}, torch.float32),
        (True, {"markov_rank": 8, "markov": "linear"}, torch.float32),
        (False, {**MARKOV, **LAYOUT, "confidence_head": True}, torch.float32),
    ],
)
def test_a_file_drafts_what_was_trained(
    tmp_path: Path, target: Target, vocabulary: Path, whole: bool, options: dict[str, Any], dtype: torch.dtype
) -> None:
    drafter = block_network(target, "taps", whole=whole, options=options)
    with torch.no_grad():
        for parameter in drafter.parameters():  # what rounds is not compared here
            parameter.copy_(parameter.to(dtype))
    FORMATS["gguf"].write(drafter, tmp_path / "out", dtype, "card\n", vocabulary)
    rungs = climb(
        drafter, FORMATS["gguf"].make(drafter), GGUFFileReader(tmp_path / "out", stock_model(target)), PROMPT
    )
    assert all(r.same for r in rungs), rungs[-1].line
    assert {p.name for p in (tmp_path / "out").iterdir()} == {FILE, "README.md", "export.json"}


@pytest.mark.parametrize("options", [FILL_IN, MARKOV])
def test_a_target_that_scales_its_embedding(
    tmp_path: Path, vocabulary: Path, options: dict[str, Any]
) -> None:
    """Gemma's: llama.cpp multiplies the target's rows by a key of the file."""
    gemma = tiny_target("gemma3_text")
    drafter = block_network(gemma, "taps", whole=True, options=options)
    made = FORMATS["gguf"].write(drafter, tmp_path / "out", torch.float32, "", vocabulary)
    assert not any("embed" in note or "vLLM" in note for note in made.notes)
    reader = GGUFFileReader(tmp_path / "out", tiny_model("gemma3_text", gemma.vocab_size))
    assert reader.config["input_embedding_scale"] == 8 and "token_embd.weight" not in reader.stored()
    rungs = climb(drafter, FORMATS["gguf"].make(drafter), reader, PROMPT)
    assert all(r.same for r in rungs), rungs[-1].line


def test_scaled_frequencies_are_written(tmp_path: Path, target: Target, vocabulary: Path) -> None:
    rotary = target.body.rotary_emb
    before = rotary.inv_freq.clone()
    drafter = block_network(target, "taps", whole=True, options=FILL_IN)
    if drafter.config.rotaries:
        pytest.skip("this target's drafters turn keys themselves")
    kind = getattr(rotary, "rope_type", "default")
    try:
        rotary.rope_type = "llama3"
        rotary.inv_freq[2:] /= 4
        made = FORMATS["gguf"].make(drafter)
        assert made.tensors["rope_freqs.weight"][1:4].tolist() == pytest.approx([1, 4, 4], rel=1e-5)
        rotary.rope_type = "longrope"
        with pytest.raises(UserError, match="rope_type=longrope"):
            FORMATS["gguf"].make(drafter)
    finally:
        rotary.inv_freq.copy_(before)
        rotary.rope_type = kind


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    ],
)  # fmt: skip
def test_angles_of_another_engines_drafter(
    tmp_path: Path, target: Target, vocabulary: Path, scaling: dict[str, Any] | None
) -> None:
    """Its own base, and its own scaling."""
    folder = write(tmp_path / "theirs", dflash_config(target, rope_scaling=scaling), backbone(target))
    drafter = load_drafter(folder, target)
    FORMATS["gguf"].write(drafter, tmp_path / "out", torch.float32, "", vocabulary)
    made, reader = FORMATS["gguf"].make(drafter), GGUFFileReader(tmp_path / "out", stock_model(target))
    assert ("rope_freqs.weight" in made.tensors) is (scaling is not None)
    assert (last := climb(drafter, made, reader, PROMPT)[-1]).same, last.line


def test_what_the_file_does_not_hold(tmp_path: Path, target: Target, vocabulary: Path) -> None:
    for options, says in [
        ({"markov_rank": 8, "markov": "tanh"}, "vanilla Markov head alone"),
        ({"markov_rank": 8, "markov": "silu"}, "drafter.markov=vanilla or linear"),
        ({**FILL_IN, "convolution": True}, "--format gguf: the format has no drafter.convolution"),
    ]:
        with pytest.raises(UserError, match=says):
            FORMATS["gguf"].make(block_network(target, "taps", whole=True, options=options))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    theirs = write(tmp_path / "theirs", dflash_config(target, rope_scaling=yarn), backbone(target))
    with pytest.raises(UserError, match=r"rotary tables are 1.13863 times as long"):
        FORMATS["gguf"].make(load_drafter(theirs, target))
    drafter = block_network(target, "taps", whole=True, options=FILL_IN)
    with pytest.raises(UserError, match="--target-gguf FILE"):
        FORMATS["gguf"].write(drafter, tmp_path / "out", torch.float32, "")
    (tmp_path / "torn.gguf").write_bytes(vocabulary.read_bytes()[:100])
    with pytest.raises(UserError, match="--target-gguf=.*torn.gguf: can't be read"):
        FORMATS["gguf"].write(drafter, tmp_path / "out", torch.float32, "", tmp_path / "torn.gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "typed", "says"),
    [("tokenizer.ggml.model", 9, "an array of"), ("tokenizer.ggml.tokens", 8, "")],
    ids=["an array without end", "a text"],
)
def test_a_vocabulary_that_is_none(
    tmp_path: Path, target: Target, vocabulary: Path, key: str, typed: int, says: str
) -> None:
    """The type behind a key is another one."""
    drafter = block_network(target, "taps", whole=True, options=FILL_IN)
    raw = vocabulary.read_bytes()
    at = raw.index(key.encode()) + len(key)
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw[:at] + typed.to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(UserError, match=f"--target-gguf=.*odd.gguf: can't be read: .*{says}") as caught:
        FORMATS["gguf"].write(drafter, tmp_path / "out", torch.float32, "", path)
    assert str(caught.value).count("not a readable") == 1


def test_a_vocabulary_that_is_a_number(tmp_path: Path, target: Target) -> None:
    writer = GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_uint32("tokenizer.ggml.tokens", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    drafter = block_network(target, "taps", whole=True, options=FILL_IN)
    with pytest.raises(UserError, match="odd.gguf: can't be read: it has no vocabulary"):
        FORMATS["gguf"].write(drafter, tmp_path / "out", torch.float32, "", tmp_path / "odd.gguf")


def test_names() -> None:
    assert gguf_name("layers.3.self_attn.q_proj.weight") == "blk.3.attn_q.weight"
    assert gguf_name("hidden_norm.weight") == "enc.output_norm.weight" and gguf_name("d2t") == "d2t"


def test_a_confidence_head_of_hidden_states_alone_gets_llama_cpps_columns(target: Target) -> None:
    options = {**MARKOV, "confidence_head": True}
    drafter = block_network(target, "taps", whole=True, options=options)
    drafter.config = replace(drafter.config, confidence_input="hidden")
    drafter.confidence = drafter.new_confidence()
    made = FORMATS["gguf"].make(drafter)
    weight, width = made.tensors["confidence_head.proj.weight"], drafter.config.hidden_size
    assert weight.shape == (1, width + made.config["markov_rank"]) and not weight[:, width:].any()
    assert torch.equal(weight[:, :width], drafter.confidence.out.weight)
