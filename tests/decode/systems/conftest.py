"""A model as transformers opens it, and a drafter that knows its answer to one prompt by heart."""

from __future__ import annotations

from typing import Any

import pytest

from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target
from tests.builders import PROMPT, overfit_block_network


@pytest.fixture(scope="module")
def model() -> Any:
    return load_target("debug", "float32", "cpu", fast=False).model


@pytest.fixture(scope="module")
def drafter(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(overfit_block_network(load_target("debug", "float32", "cpu"), PROMPT), folder)
    return str(folder)


@pytest.fixture
def stock(model: Any) -> None:
    """The model as transformers opens it."""
    model.set_attn_implementation("sdpa")
