"""torch's default type has no say in decoding: transformers sets it for the whole process while a checkpoint is loaded, which another
thread may do at any moment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from decode import Decoder, Sampling
from decode.systems.construction import build
from decode.systems.opening import OpenDrafters
from decode.systems.parsing import read_method
from decode.systems.registry import SYSTEMS
from tests.builders import PROMPT

SAMPLINGS = (Sampling(repetition_penalty=1.4), Sampling(0.8, 0.9, 20, seed=4))


@pytest.fixture(autouse=True)
def default_restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def outputs(decoder: Decoder) -> list[list[int]]:
    return [decoder.generate(PROMPT, max_new_tokens=10, sampling=s).tokens for s in SAMPLINGS]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_writes_the_same(shallow_parts: OpenDrafters, name: str) -> None:
    if name == "duo":  # whose draft length follows measured times by default
        name = "duo:controller=fixed"
    decoder = build(read_method(name), shallow_parts, None)
    wanted = outputs(decoder)
    torch.set_default_dtype(torch.bfloat16)
    assert outputs(decoder) == wanted
