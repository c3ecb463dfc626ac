"""What tests of several rooms share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from align.config.parser import load_recipe
from align.data.synthesis import synthesize
from specalign.kernels import linear
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.rows import shards as data


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug")


@pytest.fixture(scope="module")
def samples(target: Target) -> data.Samples:
    """Five texts of random tokens."""
    generator, sizes = torch.Generator().manual_seed(0), (30, 17, 25, 40, 9)
    lists = [torch.randint(4, target.vocab_size, (n,), generator=generator).tolist() for n in sizes]
    return data.from_lists(lists, [5, 4, 6, 3, 2], [1.0] * 5)


@pytest.fixture(scope="session")
def debug_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once for all processes of pytest-xdist, whose folders have one parent."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / "debug" / "data"
    with FileLock(root / "debug.lock"):
        synthesize(load_recipe(["recipe=debug_block"]), load_target("debug"), folder, quiet=True)
    return folder


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
