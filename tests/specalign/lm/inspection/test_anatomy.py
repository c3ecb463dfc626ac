"""What is asked of a model, by one token through it."""

from types import SimpleNamespace
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.lm.inspection.anatomy import (
    UNLIMITED,
    context_limit,
    eos_ids,
    find_body,
    inspect_model,
)
from specalign.lm.masks import install
from tests.target_models import tiny_model


@pytest.mark.parametrize(
    ("kind", "attends", "recurrent"), [("llama", 4, False), ("qwen3_next", 2, True)]
)
def test_layers_and_what_they_keep(kind: str, attends: int, recurrent: bool) -> None:
    model = tiny_model(kind, 260)
    install(model)
    found = inspect_model(model, find_body(model))
    assert len(found.layers) == 4 and found.recurrent is found.chains_only is recurrent
    assert sum(shape is not None for shape in found.shapes) == attends
    assert len(found.others) == 4 - attends and len(found.other_layers()) == 4 - attends
    if attends == 4:
        assert found.ours and found.groups == 2 and found.heads() == (2, 16)


@pytest.mark.parametrize(("kind", "layers", "kept"), [("opt", 4, 4), ("longcat_flash", 4, 8)])
def test_layers_are_found_where_they_lie(kind: str, layers: int, kept: int) -> None:
    """In a decoder within the model, and where each is counted twice."""
    model = tiny_model(kind, 260)
    install(model)
    found = inspect_model(model, find_body(model))
    assert (len(found.layers), len(found.shapes)) == (layers, kept)
    assert found.repeats is (layers != kept)


def test_context_and_ends() -> None:
    assert context_limit(SimpleNamespace(n_positions=7)) == 7
    assert context_limit(SimpleNamespace(max_position_embeddings=None)) == UNLIMITED
    text = SimpleNamespace(eos_token_id=4, vocab_size=9)

    def ends(of_generation: Any, of_tokenizer: Any = None) -> tuple[int, ...]:
        generation = SimpleNamespace(eos_token_id=of_generation)
        config = SimpleNamespace(get_text_config=lambda decoder: text)
        return eos_ids(config, generation, SimpleNamespace(eos_token_id=of_tokenizer))

    assert ends([5, 2], 7) == (2, 5) and ends(5, 7) == (5,)
    assert ends(None) == (4,) and ends([], 7) == (4, 7)  # `generate` would never end
    assert ends([*range(3, 1_000_000)]) == (3, 4, 5, 6, 7, 8) and ends(9) == ()
    with pytest.raises(UserError, match="eos_token_id: .* is not a token id"):
        ends("5")
