"""What the tests of exports share."""

from __future__ import annotations

from pathlib import Path

import pytest

from specalign.lm.model import Target
from tests.target_models import write_gguf


@pytest.fixture(scope="module")
def vocabulary(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as a GGUF file."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_gguf(path, target)
    return path
