"""Inputs of `generate` that drafts can't honour are refused by name, and empty ones are not."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from decode.portable.generate import check_call, check_rotary, decode
from tests.target_models import tiny_model

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", 260)


def test_empty_inputs_are_taken(model: Any) -> None:
    given: dict[str, Any] = {
        "mm_encoder_outputs": {"image": None}, "inputs_embeds": None, "images": [], "output_router_logits": False,
        "pixel_values": torch.zeros(0, 3, 4, 4), "attention_mask": torch.ones_like(IDS), "cache": DynamicCache(),
        "position_ids": torch.tensor([[0, 1, 2, 3]]), "use_cache": True,
    }  # fmt: skip
    check_call(model, GenerationConfig(), given, IDS)


def test_texts_that_reach_another_rotary_table() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    }  # fmt: skip
    longrope = tiny_model("phi3", 260, rope_parameters=rope, original_max_position_embeddings=24)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    dynamic = tiny_model("llama", 260, rope_parameters=rope, max_position_embeddings=24)
    for model, kind in ((longrope, "longrope"), (dynamic, "dynamic")):
        check_rotary(model, 24)
        with pytest.raises(ValueError, match=f"^max_length=25: .* change at 24 tokens .{kind}"):
            loop = partial(decode, drafter=None, streamer=None)
            model.generate(IDS, max_new_tokens=21, custom_generate=loop)
