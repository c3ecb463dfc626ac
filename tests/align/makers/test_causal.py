"""Drafters out of the layers of a wrapped text model."""

from __future__ import annotations

import pytest

from align.target.debug import debug_model
from align.target.proof import proven
from tests.target_drafters import of_own_layers
from tests.target_models import some_text
from tests.target_wrappers import tiny_wrapper


@pytest.mark.parametrize("kind", ["autoregressive", "masked_lm"])
def test_drafters_out_of_the_layers_of_a_wrapped_text_model(kind: str) -> None:
    """Saved under the text model's own class, and loaded again. Whether head and embedding are one, the whole model says, not its
    text model's config."""
    model = tiny_wrapper("idefics3", tie_word_embeddings=True)
    assert model.config.text_config.tie_word_embeddings and not model.config.tie_word_embeddings
    target = proven(model, debug_model("Llama")[1], "wrapped")
    assert of_own_layers(target, kind, [some_text(target, 9)[0].tolist()], 8) == "yes"
