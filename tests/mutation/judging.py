"""A mutant in a copy of the tree, and the first test that fails under it."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.mutation.forks import Chosen, in_child
from tests.mutation.mutants import Mutant

COPIED = (
    "align",
    "decode",
    "tests",
    "recipes",
    "docs",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
)
LINKED = ("pretrained",)

Timed = dict[str, float]
"""Names of tests in the order in which they run, with the seconds that they usually take."""


def copy_of_the_tree(root: Path, scratch: Path) -> Path:
    """This process' own, with the compiled files that lie in the tree."""
    to = scratch / str(os.getpid())
    if not to.exists():
        to.mkdir()
        for name in COPIED:
            copy = shutil.copytree if (root / name).is_dir() else shutil.copy2
            copy(root / name, to / name)
        for name in LINKED:
            (to / name).symlink_to((root / name).resolve())
    return to


def judge(tree: Path, mutant: Mutant, batches: list[Timed]) -> tuple[str, list[str]]:
    """What killed it, "" if nothing did; and the tests that it survived."""
    survived: list[str] = []
    for batch in batches:
        while batch:
            with applied(tree, mutant):
                status, started = run(tree, batch)
            if status == 0:
                survived += started
                break
            if not started:
                return "at import", survived
            if passes(tree, started[-1], batch[started[-1]]):
                return started[-1] + (" (hangs or crashes)" if status < 0 else ""), survived
            batch = {name: seconds for name, seconds in batch.items() if name != started[-1]}
    return "", survived


@contextmanager
def applied(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Each text gets a time of its own: by that Python knows whether what it has compiled is still the file's."""
    path = tree / mutant.path
    source, times = path.read_text(), path.stat()
    changed = mutant.applied(source)
    path.write_text(changed)
    os.utime(path, (zlib.crc32(changed.encode()),) * 2)
    try:
        yield
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def run(tree: Path, tests: Timed) -> tuple[int, list[str]]:
    """Status of pytest, 0 too where none of the tests is left; and the tests that were started: one that fails is the last."""
    started = tree / "started.txt"
    files = list(dict.fromkeys(name.split("::")[0] for name in tests))
    status = in_child(tree, files, Chosen(tests, started), "-x")
    # 4: a mutant that can't be imported by a conftest.py either
    if status not in (0, 1, 2, 4, 5) and status > 0:
        raise RuntimeError((tree / "pytest.log").read_text())
    return 0 if status == 5 else status, started.read_text().splitlines()


@cache
def passes(tree: Path, test: str, seconds: float) -> bool:
    """Alone and without a mutant: what fails here shows nothing."""
    return run(tree, {test: seconds})[0] == 0
