"""What is asked of a model, by one token through it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.lm.inspection.anatomy import UNLIMITED, context_limit, eos_ids


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
    with pytest.raises(
        UserError, match="generation_config.json: eos_token_id: .* is no token's id"
    ):
        ends("5")
