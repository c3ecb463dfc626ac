"""Which test executes which line of the rooms, how long it takes, and whether it passes: recorded once per tree."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from align.common.text import say
from tests.mutation.forks import in_child

FOLDERS = (
    "tests/align/losses",
    "tests/decode/speculation",
    "tests/decode/engine",
    "tests/decode/drafters",
    "tests/contract",
    "tests/decode",
    "tests/align/training",
)
"""Of the tests that come to the rooms: their own first, for most mutants die of them."""
LEFT_OUT = (
    "tests/align/training/test_loggers.py",
    "tests/align/training/test_run.py",
    "tests/align/training/parallel/test_strategies.py",
    "tests/decode/engine/test_real_target.py",
    "tests/decode/reporting",
    "tests/decode/suites",
    "tests/decode/test_malformed.py",
    "tests/decode/test_report.py",
)
"""They spend their time in processes of their own or on real weights, or never come to the rooms."""

Lines = dict[str, list[int]]
"""By path."""
Hits = defaultdict[str, set[int]]


@dataclass(frozen=True)
class Test:
    """`lines`: executed in the test itself. `shared`: at import or in a fixture of its whole file."""

    name: str
    seconds: float
    passed: bool
    lines: Lines
    shared: Lines
    key: str
    """Of its name and its file's contents."""

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


def files_in(root: Path, folder: str) -> list[str]:
    """Test files that are not of an earlier folder."""
    earlier = FOLDERS[: FOLDERS.index(folder)]
    names = sorted(str(p.relative_to(root)) for p in (root / folder).rglob("test_*.py"))
    return [name for name in names if not name.startswith((*earlier, *LEFT_OUT))]


def key_of_the_tree(root: Path) -> str:
    """Changes with the code and with what tests share, not with the tests themselves."""
    paths = [p for room in ("align", "decode", "recipes", "tests") for p in (root / room).rglob("*.*")]
    kept = sorted(
        p for p in paths if p.suffix in (".py", ".yaml", ".json") and not p.name.startswith("test_")
    )
    return _digest(b"".join(str(p.relative_to(root)).encode() + p.read_bytes() for p in kept if not p.match("tests/mutation/*")))  # fmt: skip


def recorded_to(folder: Path, tree: Path, path: str) -> Path:
    contents = path.encode() + (tree / path).read_bytes() + Path(__file__).read_bytes()
    return folder / f"{_digest(contents)}.json"


def record(folder: Path, tree: Path, path: str, rooms: tuple[str, ...]) -> None:
    """Runs the tests of a file in a copy of the tree."""
    to = recorded_to(folder, tree, path)
    status = in_child(tree, [path], Recorder(tree, rooms, to))
    if not to.exists():
        say(f"left out: {path} ends with {status} on the tree as it is")
        to.write_text(json.dumps({"shared": {}, "tests": []}))


def read(path: Path) -> list[Test]:
    found = json.loads(path.read_text())
    return [
        Test(**test, shared=found["shared"], key=_digest((path.stem + test["name"]).encode()))
        for test in found["tests"]
    ]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Recorder:
    """A pytest plugin that traces the files of the rooms and nothing else."""

    def __init__(self, tree: Path, rooms: tuple[str, ...], to: Path) -> None:
        self.paths = {str(p): str(p.relative_to(tree)) for room in rooms for p in (tree / room).glob("*.py")}
        self.to, self.passed = to, True
        self.tests: list[dict[str, Any]] = []
        self.shared = self.now = Hits(set)

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """Conftests import the rooms."""
        threading.settrace(self.call)
        sys.settrace(self.call)

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        text = json.dumps({"shared": _sorted(self.shared), "tests": self.tests})
        self.to.with_suffix(".part").write_text(text)
        self.to.with_suffix(".part").replace(self.to)

    def call(self, frame: FrameType, event: str, value: Any) -> Any:
        path = self.paths.get(frame.f_code.co_filename)
        return None if path is None else self.tracer(frame.f_code, path)

    def tracer(self, code: CodeType, path: str) -> Any:
        """Modules and classes are executed once for all tests of the file."""
        lines = (self.now if code.co_flags & CO_OPTIMIZED else self.shared)[path]
        lines.add(code.co_firstlineno)

        def line(frame: FrameType, event: str, value: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return line

        return line

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        before = self.now
        self.now = before if fixturedef.scope == "function" else self.shared
        try:
            return (yield)
        finally:
            self.now = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.now, self.passed, start = Hits(set), True, time.monotonic()
        done = yield
        seconds = round(time.monotonic() - start, 3)
        self.tests.append(
            {"name": item.nodeid, "seconds": seconds, "passed": self.passed, "lines": _sorted(self.now)}
        )
        self.now = self.shared
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed &= report.passed


def _sorted(hits: Hits) -> Lines:
    return {path: sorted(lines) for path, lines in hits.items() if lines}
