"""What tests of several rooms of the shared package use."""

import ctypes
from collections.abc import Callable

import pytest

from specalign.kernels import linear
from tests.fixtures import samples, target

__all__ = ["round_rows", "samples", "target"]


@pytest.fixture
def round_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches on or off that rows beside int8 weights are rounded; skips the test where the processor can't have it on."""
    found = linear.rows_library()
    switch = None if found is None else ctypes.c_int.in_dll(found, "eight_bits")
    here = switch is not None and bool(switch.value)

    def choose(on: bool) -> None:
        if on and not here:
            pytest.skip("AVX512 without VNNI")
        if switch is not None:
            monkeypatch.setattr(switch, "value", int(on))

    return choose
