"""Every test of this room runs with each library that was compiled for this processor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from align.kernels import layers, linear, tree


@pytest.fixture(autouse=True, params=linear.LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = linear.opened(request.param)
    if found is None:
        if linear.rows_library() is not None:
            pytest.skip(f"{request.param} is not for this processor, or was not compiled")
        return  # the tests themselves say what they need
    for module in (linear, layers, tree):
        monkeypatch.setattr(module, "rows_library", lambda: found)


@pytest.fixture
def round_rows(library: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
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
