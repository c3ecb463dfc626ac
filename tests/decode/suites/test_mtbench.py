"""MT-Bench's rows, of the hub and of the package."""

from __future__ import annotations

import pytest

from decode.suites import mtbench
from decode.suites.prompt import Prompt


def test_rows_of_hub_and_package() -> None:
    assert mtbench.read({"prompt_id": 7, "category": "math", "prompt": ["one", "two"]}, 0) == Prompt(
        "mtbench-7", "one", "math"
    )
    assert mtbench.read({"question_id": "81", "turns": ["one", "two"]}, 0).content == "one"
    with pytest.raises(KeyError, match="prompt"):
        mtbench.read({"prompt": "not a list of turns"}, 0)
