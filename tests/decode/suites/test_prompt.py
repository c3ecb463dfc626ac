"""The text of a row."""

from __future__ import annotations

import pytest

from decode.suites.prompt import text


def test_the_first_column_that_holds_text() -> None:
    assert text({"a": " ", "b": 3, "c": " yes "}, "a", "b", "c") == "yes"
    with pytest.raises(KeyError, match="'a'"):
        text({"a": " "}, "a", "b")
