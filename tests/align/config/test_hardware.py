"""What a recipe asks of the machine: devices that contradict, and which process prints."""

from __future__ import annotations

from typing import Any

import pytest

from align.config import hardware
from align.config.hardware import check_devices, devices
from align.config.parser import load_recipe
from specalign.common.errors import UserError


def recipe(*words: str) -> Any:
    return load_recipe(["recipe=debug_block", *words])


def test_what_the_machine_lacks_or_what_contradicts_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "gpu_count", lambda: 0)
    with pytest.raises(UserError, match="torch sees no GPU"):
        check_devices(recipe("launch.accelerator=gpu"))
    with pytest.raises(UserError, match="target.device=cuda:1 contradicts launch.accelerator=cpu"):
        recipe("launch.accelerator=cpu", "target.device=cuda:1")
    monkeypatch.setattr(hardware, "gpu_count", lambda: 1)
    with pytest.raises(UserError, match="launch.devices=2: torch sees 1"):
        check_devices(recipe("launch.accelerator=gpu", "launch.devices=2"))
    assert devices(recipe("target.device=cuda:1")) == [1]
