"""What is asked of a model, by one token through it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from align.common.errors import UserError
from align.target.inspection.anatomy import UNLIMITED, context_limit, decoder, eos_ids, examine, query_heads
from align.target.interface import install
from tests.target_models import tiny_model


@pytest.mark.parametrize(("kind", "attends", "recurrent"), [("llama", 4, False), ("qwen3_next", 2, True)])
def test_layers_and_what_they_keep(kind: str, attends: int, recurrent: bool) -> None:
    model = tiny_model(kind, 260)
    install(model)
    found = examine(model, decoder(model))
    assert len(found.layers) == 4 and found.recurrent is found.chains_only is recurrent
    assert sum(shape is not None for shape in found.shapes) == attends
    assert len(found.others) == 4 - attends and len(found.other_layers()) == 4 - attends
    if attends == 4:
        assert found.ours and found.groups == 2 and found.heads(model.config) == (2, 16)


def test_a_decoder_without_a_list_of_layers_is_refused() -> None:
    model = tiny_model("llama", 260)
    body = decoder(model)
    body.layers = nn.Sequential(*body.layers)
    with pytest.raises(NotImplementedError, match="no list of layers"):
        examine(model, body)


@pytest.mark.parametrize(
    ("kind", "layers", "kept"),
    [("bert", 4, 4), ("modernbert-decoder", 4, 4), ("longcat_flash", 4, 8), ("hrm_text", 4, 32)],
)
def test_layers_are_found_where_they_lie(kind: str, layers: int, kept: int) -> None:
    """In an encoder, beside a head that is called a decoder, and where each is counted twice or run in turns."""
    model = tiny_model(kind, 260)
    install(model)
    found = examine(model, decoder(model))
    assert len(found.layers) == layers and len(found.shapes) == kept and found.repeats is (layers != kept)


def test_heads_of_layers_that_differ_are_the_firsts() -> None:
    layers = [SimpleNamespace(num_attention_heads=8), SimpleNamespace(num_attention_heads=2)]
    assert query_heads(SimpleNamespace(per_layer_config=layers)) == 8
    assert (
        query_heads(tiny_model("dots3_note_text", 260).config)
        == query_heads(SimpleNamespace(num_attention_heads=4))
        == 4
    )
    assert query_heads(SimpleNamespace()) == 1


def test_a_choice_of_keys_within_the_context_is_refused() -> None:
    model = tiny_model("doge", 260)
    assert examine(model, decoder(model)).attends
    model.config.keep_window_size = 16
    with pytest.raises(NotImplementedError, match="keep_window_size=16"):
        examine(model, decoder(model))


def test_context_and_ends() -> None:
    assert context_limit(SimpleNamespace(n_positions=7)) == 7
    assert context_limit(SimpleNamespace(max_position_embeddings=None)) == UNLIMITED
    text = SimpleNamespace(eos_token_id=4, vocab_size=9)

    def ends(of_generation: Any, of_tokenizer: Any = None) -> tuple[int, ...]:
        generation = SimpleNamespace(eos_token_id=of_generation)
        config = SimpleNamespace(get_text_config=lambda decoder: text)
        model = SimpleNamespace(generation_config=generation, config=config)
        return eos_ids(model, SimpleNamespace(eos_token_id=of_tokenizer))

    assert ends([5, 2], 7) == (2, 5) and ends(5, 7) == (5,)
    assert ends(None) == (4,) and ends([], 7) == (4, 7)  # `generate` would never end
    assert ends([*range(3, 1_000_000)]) == (3, 4, 5, 6, 7, 8) and ends(9) == ()
    for wrong in ("5", -1, 2.0, True, [5, None], [[5]]):
        with pytest.raises(UserError, match="generation_config.json: eos_token_id: .* is no token's id"):
            ends(wrong)
    assert torch.is_grad_enabled()
