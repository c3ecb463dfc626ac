"""The settings of sampling: their ranges, and by their names."""

import pytest

from decode.speculation.settings import Sampling, read_sampling
from specalign.common.errors import UserError
from specalign.common.text import say_once


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
    assert read_sampling(None, {}) == Sampling() and read_sampling(Sampling(1.0), {}) == Sampling(
        1.0
    )
    assert read_sampling(None, {"temperature": 0.7, "banned": [3]}) == Sampling(0.7, banned=(3,))
    with pytest.raises(UserError, match="pass a decode.Sampling"):
        read_sampling(Sampling(), {"seed": 1})


def test_settings_without_effect_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    say_once.cache_clear()
    for _ in range(2):
        assert read_sampling(None, {"top_p": 0.9, "seed": 3, "top_k": 0}).greedy
    assert capsys.readouterr().err == (
        "note: top_p, seed ignored: temperature=0 is greedy (temperature=1 samples)\n"
    )
    read_sampling(None, {"temperature": 1.0, "top_p": 0.9, "seed": 3})
    read_sampling(None, {"top_p": 1.0, "seed": None, "repetition_penalty": 1.1})
    assert capsys.readouterr().err == ""
