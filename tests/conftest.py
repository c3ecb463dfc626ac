"""What tests of several packages share. Imports no torch: pytest-xdist's first process, which runs no test, imports this too."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from filelock import FileLock

from align import synthesize

# models are freed by reference counts: cycles may wait
gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish() -> None:
    """Imported modules and collected tests live to the end: the garbage collector looks at later objects only."""
    gc.freeze()


@pytest.fixture(scope="session")
def debug_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once for all processes of pytest-xdist, whose folders have one parent. In few batches: most prompts of a random target
    do not end and are left out."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with FileLock(root / "debug.lock"):
        synthesize.main(["recipe=debug_block", "data.batch_size=192", f"output={root / 'debug'}"])
    return root / "debug" / "data"
