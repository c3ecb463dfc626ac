"""What tests of several packages share. Imports no torch: pytest-xdist's first process, which runs no test, imports this too."""

import copy
import functools
import gc
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from filelock import FileLock

from align import synthesize
from align.config import recipe_files

# models are freed by reference counts: cycles may wait
gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish() -> None:
    """Imported modules and collected tests live to the end: the garbage collector looks at later objects only."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cheap_repetitions() -> Iterator[None]:
    """What tests do hundreds of times: recipe files are parsed once, certificates read once, and nothing waits for the disk."""
    parse = functools.cache(recipe_files.parse_yaml)

    def parse_copy(text: str, where: str) -> Any:
        return copy.deepcopy(parse(text, where))

    with (
        mock.patch.object(recipe_files, "parse_yaml", parse_copy),
        mock.patch("ssl.create_default_context", functools.cache(ssl.create_default_context)),
        mock.patch("os.fsync", lambda handle: None),
    ):
        yield


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
