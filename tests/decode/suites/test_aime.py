"""AIME's rows, of the hub and among others in the package's file."""

from __future__ import annotations

from decode.suites import aime


def test_rows_of_hub_and_package() -> None:
    row = aime.read({"problem": "Find x.", "id": 3}, 0)
    assert row is not None and row.id == "aime-3" and row.content.startswith("Find x.\n\nReason")
    assert aime.read({"source": "AIME2025", "question": "Find y."}, 4) is not None
    assert aime.read({"source": "GPQA Diamond", "question": "Which?"}, 0) is None
