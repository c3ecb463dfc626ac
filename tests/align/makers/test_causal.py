"""Drafters out of the layers of a wrapped text model."""

from __future__ import annotations

import pytest

from align.config.drafter import DrafterConfig
from align.makers.causal import make_causal
from specalign.common.errors import UserError
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from specalign.lm.proof import prove_target
from specalign.lm.source import ModelSource
from tests.target_drafters import of_own_layers
from tests.target_models import some_text, tiny_target
from tests.target_wrappers import tiny_wrapper


@pytest.mark.parametrize("kind", ["autoregressive", "masked_lm"])
def test_drafters_out_of_the_layers_of_a_wrapped_text_model(kind: str) -> None:
    """Saved under the text model's own class, and loaded again. Whether head and embedding are one, the whole model says, not its
    text model's config."""
    model = tiny_wrapper("idefics3", tie_word_embeddings=True)
    assert model.config.text_config.tie_word_embeddings and not model.config.tie_word_embeddings
    target = prove_target(model, debug_model("Llama")[1], ModelSource("wrapped"))
    assert of_own_layers(target, kind, [some_text(target, 9)[0].tolist()], 8) == "yes"


def test_a_causal_lm_that_is_named_keeps_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target("debug")
    for layers, said in ((2, ""), (4, ""), (3, "layers=4; the recipe asks for layers=3")):
        make_causal(target, DrafterConfig(kind="autoregressive", init="debug", layers=layers))
        note = f"note: drafter.init=debug keeps its own {said}\n" if said else ""
        assert capsys.readouterr().err == note


def test_a_head_with_a_bias_of_zeros_has_one() -> None:
    """Transformers' own start: the saved folder would lack it."""
    target = tiny_target("phi")
    assert target.head_bias_V is not None
    target.head_bias_V.data.zero_()
    with pytest.raises(UserError, match="its head has a bias"):
        make_causal(target, DrafterConfig(kind="autoregressive", layers=2))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("bert-generation", "its head has a bias"),
        ("mamba", "its training graph differs from the model's own by"),
    ],
)
def test_what_a_drafter_of_layers_lacks_is_said_in_one_line(kind: str, why: str) -> None:
    with pytest.raises(
        UserError, match=f"target '{kind}' can't serve as drafter.kind=autoregressive: {why}"
    ):
        make_causal(tiny_target(kind), DrafterConfig(kind="autoregressive", layers=2))
