"""CHAMP's rows."""

from __future__ import annotations

import pytest

from decode.suites import champ


def test_rows() -> None:
    row = champ.read({"identifier": "P_1", "_text": " Prove it. ", "category": "Number theory"}, 0)
    assert (row.id, row.category) == ("P_1", "Number theory") and row.content.startswith("Prove it.\n")
    with pytest.raises(KeyError, match="_text"):
        champ.read({"identifier": "P_1"}, 0)
