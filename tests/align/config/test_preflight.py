"""What a run lacks is said before anything is loaded or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.training.run import train


def test_what_a_start_lacks_is_said_before_the_target_writes(tmp_path: Path) -> None:
    words = ("recipe=debug_sedd", "drafter.init=no/such/drafter")
    with pytest.raises(UserError, match="drafter.init=.*no/such/drafter.*no such folder"):
        train(load_recipe([*words, f"output={tmp_path}"]), quiet=True)
    assert not (tmp_path / "data").exists()
