"""How the drafter given is to draft: numbers out of range, and what was given."""

from __future__ import annotations

from typing import Any

import pytest

from align.common.errors import UserError
from decode.methods.options import DraftOptions


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft_tokens": 0}, "draft_tokens=0: must be at least 1"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"tree_nodes": -1}, "tree_nodes=-1: must be 0 .a chain. to"),
        ({"order": "confidense"}, "did you mean 'confidence'"),
        ({"verifier": "tokn"}, "did you mean 'token'"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        DraftOptions(**options)


def test_what_was_given_becomes_options_of_a_method() -> None:
    typed = {"steps": 3, "tree_nodes": 0, "target": "t"}
    options = DraftOptions.out_of(typed)
    assert typed == {"target": "t"} and options.given == {"tree_nodes": 0, "steps": 3}
    assert options.of_a_method == {"nodes": 0, "steps": 3}
