"""torch's default type has no say in decoding: transformers sets it for the whole process while a checkpoint is loaded, which another
thread may do at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decode import Decoder, Sampling
from decode.proposers.block import BlockProposer
from decode.systems.construction import OpenDrafters, build
from decode.systems.parsing import read_method
from decode.systems.registry import SYSTEMS
from specalign.lm.loading import load_target
from tests.builders import PROMPT, block_network

SAMPLINGS = (
    Sampling(repetition_penalty=1.4),
    Sampling(1.0, seed=2),
    Sampling(0.8, 0.9, 20, seed=4),
)


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def other_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def outputs(decoder: Decoder) -> list[list[int]]:
    return [decoder.generate(PROMPT, max_new_tokens=24, sampling=s).tokens for s in SAMPLINGS]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_writes_the_same(
    shallow_parts: OpenDrafters, name: str, other_default: torch.dtype
) -> None:
    decoder = build(read_method(name), shallow_parts, None)
    wanted = outputs(decoder)
    torch.set_default_dtype(other_default)
    assert outputs(decoder) == wanted


def test_a_prepared_drafter_and_a_target_loaded_under_it(
    tmp_path: Path, other_default: torch.dtype
) -> None:
    """With the layers, trees and draws in C where there is a library."""
    saved = load_target("debug", dtype="float32", device="cpu", fast=False)
    saved.model.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    wanted = outputs(
        Decoder(load_target(str(tmp_path), dtype="float32", device="cpu", decoding=True))
    )
    torch.set_default_dtype(other_default)
    target = load_target(str(tmp_path), dtype="float32", device="cpu", decoding=True)
    assert outputs(Decoder(target)) == wanted
    torch.set_default_dtype(torch.float32)
    network = block_network(target, "shared_kv", markov_rank=8)
    network.prepare_for_drafting()
    decoder = Decoder(target, BlockProposer(network, tree_nodes=None))
    wanted = outputs(decoder)
    torch.set_default_dtype(other_default)
    assert outputs(decoder) == wanted
