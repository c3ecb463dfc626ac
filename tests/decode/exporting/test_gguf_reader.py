"""Faults in a GGUF file are named by the reader that follows llama.cpp's definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from align.target.model import Target
from decode.engine.compiled import stock_model
from decode.exporting.gguf_reader import GGUFFileReader
from decode.exporting.ladder import climb
from decode.exporting.registry import FORMATS
from tests.builders import PROMPT, block_network

FILL_IN = {"block_layout": "fill_in", "markov_rank": 0}


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        ("dflash.target_layers", [1, 2], "tapped features"),
        ("dflash.rope.freq_base", 1234.0, "rotary tables"),
        ("dflash.attention.causal", True, "mask"),
        ("tokenizer.ggml.mask_token_id", 5, "block"),
        ("dflash.context_length", 7, "settings and tensors"),
    ],
)
def test_planted_faults_are_named(
    tmp_path: Path,
    target: Target,
    vocabulary: Path,
    word: str,
    value: Any,
    says: str,
) -> None:
    drafter = block_network(target, "taps", whole=True, options=FILL_IN)
    FORMATS["gguf"].write(drafter, tmp_path / "out", torch.float32, "", vocabulary)
    reader = GGUFFileReader(tmp_path / "out", stock_model(target))
    assert word in reader._words
    reader._words[word] = value
    reader.config = reader.inner = reader._config()
    last = climb(drafter, FORMATS["gguf"].make(drafter), reader, PROMPT)[-1]
    assert last.name == says and not last.same, last
