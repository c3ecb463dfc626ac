"""Networks of published families from their config.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from align.models.checkpoints.masked_lm import from_config
from tests.masked_lms import DIFFUGPT, DIFFULLAMA, DREAM, LLADA, SDAR

LLADA_8B = {
    **LLADA, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288,
    "embedding_size": 126464, "vocab_size": 126464, "max_sequence_length": 4096, "mask_token_id": 126336,
}  # fmt: skip
DREAM_7B = {
    **DREAM, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072, "mask_token_id": 151666,
}  # fmt: skip
SDAR_17B = {
    **SDAR, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "mask_token_id": 151669,
}  # fmt: skip
LLAMA_7B = {
    **DIFFULLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000,
}  # fmt: skip
GPT2 = {**DIFFUGPT, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLADA_8B, 8_015_581_184),
        (DREAM_7B, 7_615_616_512),
        ({**SDAR_17B, "tie_word_embeddings": True}, 1_720_574_976),
        (SDAR_17B, 1_720_574_976 + 151_936 * 2048),
        (LLAMA_7B, 6_738_415_616),
        ({**GPT2, "vocab_size": 50257}, 124_439_808),
        ({**GPT2, "vocab_size": 50258}, 124_439_808 + 768),
    ],
)
def test_published_sizes(config: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        network = from_config(config)
    assert sum(p.numel() for p in network.parameters()) == count
    if "d_model" in config or "rope_theta" in config:
        assert network.model.config.rope_parameters["rope_theta"] == config["rope_theta"]
