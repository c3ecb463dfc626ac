"""Every test of this room runs with each library that was compiled for this processor."""

import pytest

from specalign.kernels import layers, linear, tree


@pytest.fixture(autouse=True, params=linear.LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = linear.open_library(request.param)
    if found is None:
        if linear.rows_library() is not None:
            pytest.skip(f"{request.param} is not for this processor, or was not compiled")
        return  # the tests themselves say what they need
    for module in (linear, layers, tree):
        monkeypatch.setattr(module, "rows_library", lambda: found)
