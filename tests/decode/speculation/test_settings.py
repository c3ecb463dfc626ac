"""The settings of sampling: their ranges, and by their names."""

from __future__ import annotations

import pytest

from align.common.errors import UserError
from decode.speculation.settings import Sampling, named


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("temperature", 1e-6), ("temperature", "1"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("top_k", 2.5),
        ("repetition_penalty", 0), ("repetition_penalty", -2.0),
        ("seed", -1), ("seed", 1.5), ("seed", 2**70),
        ("min_p", 1.1), ("min_p", -0.1), ("presence_penalty", float("nan")), ("min_new_tokens", -1),
        ("banned", (1, -2)), ("banned", "ab"), ("banned", (1.5,)),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{field}="):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_by_their_names() -> None:
    assert named(None, {}) == Sampling() and named(Sampling(1.0), {}) == Sampling(1.0)
    assert named(None, {"temperature": 0.7, "banned": [3]}) == Sampling(0.7, banned=(3,))
    with pytest.raises(UserError, match="sampling and seed are two places for one setting: give one"):
        named(Sampling(), {"seed": 1})
