"""Texts of different lengths as one answer of `generate`."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from decode.systems.generate_output import output_of

IDS = torch.tensor([[1, 2], [3, 4]])


def test_shorter_texts_are_padded_and_their_logits_are_zeros_behind_the_end() -> None:
    config = GenerationConfig(return_dict_in_generate=True, output_scores=True)
    config._pad_token_tensor = torch.tensor(9)
    raw, processed = [torch.ones(3)] * 2, [torch.full((3,), 2.0)] * 2
    out = output_of(config, IDS, [[5, 6], [7]], [(raw, processed), (raw[:1], processed[:1])])
    assert out.sequences.tolist() == [[1, 2, 5, 6], [3, 4, 7, 9]] and out.logits is None
    assert torch.stack(out.scores).amax(-1).tolist() == [[2.0, 2.0], [2.0, 0.0]]


def test_tokens_alone() -> None:
    out = output_of(GenerationConfig(), IDS.int(), [[5], [7]], [([], []), ([], [])])
    assert out.tolist() == [[1, 2, 5], [3, 4, 7]] and out.dtype == torch.int32
