"""Each call of `generate` that drafts can't honour is refused by its name, and one that asks for nothing is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from decode.portable.checks import check_call, check_length
from decode.portable.generate import decode
from tests.target_models import tiny_model
from tests.target_wrappers import tiny_wrapper

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", 260)


class QuantizedCache(DynamicCache):
    """What one of transformers is called; its packages may be missing."""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: drafts are"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: asks for other drafts"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    ],
)
def test_settings(model: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_call(model, GenerationConfig(**settings), {}, IDS)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"inputs_embeds": torch.zeros(2, 4, 8)}, "inputs_embeds: only tokens"),
        ({"token_type_ids": torch.zeros_like(IDS)}, "token_type_ids: only tokens"),  # GPT-2 adds a row for type 0
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}, "padding_side='left'"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])}, "a text has no token but padding"),
        ({"position_ids": torch.tensor([[1, 2, 3, 4]])}, "position_ids"),
        ({"attention_mask": torch.ones(2, 9)}, r"^attention_mask .*\(2, 9\), input_ids \(2, 4\)"),
        ({"attention_mask": torch.ones(2, 1, 2, 4)}, r"^attention_mask .*\(2, 1, 2, 4\)"),
        ({"position_ids": torch.arange(9)[None]}, r"^attention_mask \(position_ids\): has the shape \(1, 9\)"),
        ({"position_ids": torch.arange(4).expand(3, 2, 4) * torch.tensor([1, 1, 2])[:, None, None]}, "position_ids"),
        ({"cache": QuantizedCache()}, "cache: is quantised"),
    ],
)  # fmt: skip
def test_inputs(model: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_call(model, GenerationConfig(), given, IDS)
    with pytest.raises(ValueError, match="no token to continue"):
        check_call(model, GenerationConfig(), {}, IDS[:, :0])


def test_texts_that_reach_another_rotary_table() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    }
    rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    longrope = tiny_model("phi3", 260, rope_parameters=rope, original_max_position_embeddings=24)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    dynamic = tiny_model("llama", 260, rope_parameters=rope, max_position_embeddings=24)
    for model, kind in ((longrope, "longrope"), (dynamic, "dynamic")):
        check_length(model, 24)
        with pytest.raises(ValueError, match=f"^max_length=25: .* change at 24 tokens .{kind}"):
            check_length(model, 25)
        with pytest.raises(ValueError, match="^max_length=25"):
            loop = partial(decode, drafter=None, accepted=[], streamer=None)
            model.generate(IDS, max_new_tokens=21, custom_generate=loop)
    check_length(tiny_model("llama", 260), 10**6)


def test_what_holds_nothing(model: Any) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    given: dict[str, Any] = {
        "mm_encoder_outputs": {"image": None}, "inputs_embeds": None, "images": [], "output_router_logits": False,
        "output_attentions": True,
        "pixel_values": torch.zeros(0, 3, 4, 4), "attention_mask": mask, "cache": DynamicCache(),
        "position_ids": torch.tensor([[0, 1, 2, 3], [1, 1, 0, 1]]), "use_cache": True,
    }  # fmt: skip
    assert torch.equal(check_call(model, GenerationConfig(), given, IDS), mask.bool())
    kinds = {
        "mm_token_type_ids": torch.zeros_like(IDS),
        "position_ids": torch.arange(4).expand(3, 2, 4),
    }
    assert bool(check_call(tiny_wrapper("qwen2_5_vl"), GenerationConfig(), kinds, IDS).all())
