"""What a format can't hold is refused in one line that names the key to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from align.common.errors import UserError
from align.target.model import Target
from decode.exporting.registry import FORMATS
from tests.builders import block_network

FILL_IN = {"block_layout": "fill_in"}


@pytest.mark.parametrize(
    ("format_name", "context", "options", "says"),
    [
        ("dflash", "taps", {}, "train with drafter.block_layout=fill_in"),
        ("dspark", "taps", FILL_IN, "train with drafter.block_layout=anchor_first"),
        (
            "dspark",
            "taps",
            {**FILL_IN, "markov_rank": 4},
            "block_layout=anchor_first and drafter.markov=tanh, linear",
        ),
        ("dflash", "shared_kv", FILL_IN, "train with drafter.context=taps"),
        ("dflash", "taps", {"markov_rank": 4}, "block_layout=fill_in and drafter.markov_rank=0$"),
        ("gguf", "taps", {"markov_rank": 4}, "'silu'; train with drafter.markov=vanilla or linear$"),
        (
            "gguf",
            "taps",
            {"markov_rank": 4, "markov": "tanh"},
            "'tanh'; train with drafter.markov=vanilla or linear$",
        ),
        ("dflash", "taps", {**FILL_IN, "markov_rank": 4}, "train with drafter.markov_rank=0"),
        ("transformers", "taps", {**FILL_IN, "convolution": True}, "train with drafter.convolution=false"),
        ("speculators", "taps", {**FILL_IN, "self_conditioning": True}, "drafter.self_conditioning=false"),
        ("dspark", "taps", {"markov_rank": 4, "markov": "silu"}, "drafter.markov=silu"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    target: Target, format_name: str, context: str, options: dict[str, Any], says: str
) -> None:
    drafter = block_network(target, context, options=options)
    with pytest.raises(UserError, match=says):
        FORMATS[format_name].make(drafter)


@pytest.mark.parametrize("format_name", ["dflash", "transformers"])
def test_a_head_with_a_bias_is_refused_where_the_engine_adds_it(
    target: Target, monkeypatch: pytest.MonkeyPatch, format_name: str
) -> None:
    """GPT-J's, Phi's: vLLM, SGLang, llama.cpp and the speculators package draft by the head's rows alone, as was trained."""
    drafter = block_network(target, "taps", whole=True, options=FILL_IN)
    for bias, refused in ((torch.zeros(target.vocab_size), False), (torch.ones(target.vocab_size), True)):
        monkeypatch.setattr(target, "head_bias_V", bias)
        FORMATS["speculators"].make(drafter)
        FORMATS["gguf"].make(drafter)
        if refused:
            with pytest.raises(UserError, match=f"--format {format_name}: the output head .* has a bias"):
                FORMATS[format_name].make(drafter)
        else:
            FORMATS[format_name].make(drafter)


@pytest.mark.parametrize("kind", ["tanh", "gated"])
def test_a_pruned_markov_head_that_one_engine_serves_is_widened_for_it(target: Target, kind: str) -> None:
    """SGLang takes whole vocabularies alone: the tokens that were not trained keep the head's own logits."""
    drafter = block_network(target, "taps", options={"markov_rank": 4, "markov": kind})
    made, vocab = FORMATS["dspark"].make(drafter), drafter.draft_vocab
    basis = made.tensors["markov_head.markov_w2.weight"]
    assert vocab is not None and len(basis) == target.vocab_size > len(vocab)
    assert not {"d2t", "lm_head.weight"} & made.tensors.keys() and "draft_vocab_size" not in made.config
    assert basis[vocab].any() and int(basis.any(dim=1).sum()) <= len(vocab)
    assert any("drafts over the target's whole one" in note for note in made.notes)


def test_the_last_layer_is_refused(target: Target) -> None:
    last = target.num_layers - 1
    drafter = block_network(target, "taps", options={**FILL_IN, "target_layers": [0, last]})
    with pytest.raises(UserError, match=f"layer {last} is the target's last"):
        FORMATS["dflash"].make(drafter)


@pytest.mark.parametrize("format_name", ["dflash", "speculators", "transformers"])
def test_a_confidence_head_is_left_out_and_that_is_said(target: Target, format_name: str) -> None:
    made = FORMATS[format_name].make(
        block_network(target, "taps", whole=True, confidence=True, options=FILL_IN)
    )
    assert any("confidence head is left out" in note for note in made.notes)
    assert not any("confidence" in name for name in made.tensors)
