"""The target of the captured engine's tests, which fail where it falls back."""

import pytest

from decode.captured import engine
from specalign.lm.model import Target
from tests.builders import shallow_target


@pytest.fixture(scope="module")
def target() -> Target:
    """Without C kernels, which a trace does not see."""
    target = shallow_target(3, fast=False)
    target.eos_ids = (7, 30)
    return target


@pytest.fixture(autouse=True)
def no_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(note: str) -> None:
        raise AssertionError(note)

    monkeypatch.setattr(engine, "say_once", fail)
