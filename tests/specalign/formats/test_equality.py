"""Which networks can be made of a target's layers is tried, not listed."""

from pathlib import Path

import pytest
import torch

from align.config.drafter import DrafterConfig
from align.makers.standalone import make_causal, make_standalone
from specalign.common.batch import Batch
from specalign.common.errors import UserError
from specalign.formats.standalone import load_standalone, save_causal, save_standalone
from specalign.lm.loading import load_target
from tests.target_models import some_text, tiny_target

CAUSAL = DrafterConfig(kind="autoregressive", layers=2, block_size=3)
MASKED = DrafterConfig(kind="masked_lm", layers=2, block_size=3)


@pytest.mark.parametrize(
    "kind",
    [
        "gemma3_text",  # scaled embeddings, windows
        "bloom",  # its own attention, no positions to give
        "glm4_moe",  # a router's numbers that are no parameters
    ],
)
def test_what_is_trained_is_what_is_saved(kind: str, tmp_path: Path) -> None:
    """Logits beyond the window, in packed rows, against the folder as it is loaded."""
    target = tiny_target(kind)
    made = make_causal(target, CAUSAL)
    save_causal(made, tmp_path)
    served, one = load_target(str(tmp_path), "float32", "cpu", fast=False), some_text(target, 40)
    document = (torch.arange(80) // 40)[None]
    found = made.logits(
        made(Batch(one.repeat(1, 2), torch.arange(40).repeat(2)[None], document, document >= 0))
    )
    wanted = served.forward(one).logits_BLV
    assert wanted is not None
    torch.testing.assert_close(found, wanted.repeat(1, 2, 1), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("cohere", "its training graph differs from the model's own"),  # its logits are scaled
        ("lfm2", "its training graph differs"),  # states that packed rows would share
        ("gemma3n_text", "it fails in this mode"),
        ("bert-generation", "its head has a bias"),
    ],
)
def test_other_causal_drafters_are_refused_in_one_line(kind: str, why: str) -> None:
    with pytest.raises(UserError, match=f"can't serve as drafter.kind=autoregressive: {why}"):
        make_causal(tiny_target(kind), CAUSAL)


@pytest.mark.parametrize("kind", ["gemma", "gpt_neox"])
def test_an_opened_network_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    target = tiny_target(kind)
    made = make_standalone(target, MASKED)
    save_standalone(made, tmp_path)
    again = load_standalone(str(tmp_path), target)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(made.named_parameters())[name].to(parameter.dtype))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("cohere", "its head has a scale, a cap or a bias"),
        ("phi", "its head has a scale, a cap or a bias"),
        ("falcon", "it supports only its own attention"),
        ("mamba", "it fails in this mode"),
    ],
)
def test_what_can_not_be_opened_is_refused_in_one_line(kind: str, why: str) -> None:
    with pytest.raises(UserError, match=f"can't serve as drafter.kind=masked_lm: {why}"):
        make_standalone(tiny_target(kind), MASKED)
