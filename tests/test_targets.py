"""The tables of docs/targets.md, and that of bf16: what their commands need beside a model."""

from __future__ import annotations

import pytest

from align.common.errors import UserError
from tests.bf16 import KINDS, main, row
from tests.target_models import tiny_model
from tests.targets import NAMES, own_rounding


@pytest.mark.parametrize(
    ("kind", "recurrent"), [("qwen3_moe", False), ("qwen3_next", True), ("minimax", True)]
)
def test_a_models_own_rounding_is_told_of_experts_and_of_its_own_cache(kind: str, recurrent: bool) -> None:
    """Grouped products of experts know no fp64; MiniMax's cache goes on by single tokens alone."""
    assert 1e-8 < own_rounding(tiny_model(kind, 260), recurrent) < 1e-4


def test_rows_are_of_known_architectures_and_say_what_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies alone draft here."""

    def refused(*_: object) -> None:
        raise UserError("no drafter")

    monkeypatch.setattr("tests.bf16.trained_drafter", refused)
    assert {*KINDS.split()} <= {*NAMES.split()}
    cells = row("mixtral").split(" | ")
    assert cells[0] == "| mixtral" and all(0 < float(x) < 0.1 for x in cells[2:5])
    assert sum(int(x.strip(" |")) for x in cells[5:]) == 8
    with pytest.raises(UserError, match="'mixtrall' is no architecture .*'mixtral'"):
        main(["mixtrall"])
