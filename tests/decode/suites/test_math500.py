"""MATH-500's rows."""

from __future__ import annotations

from decode.suites import math500


def test_rows() -> None:
    assert math500.read({"problem": "1+1", "subject": "Algebra", "unique_id": "u"}, 0).category == "Algebra"
    assert math500.read({"problem": "1+1"}, 3).id == "math500-3"
