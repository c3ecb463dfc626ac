"""Which tests a mutant has to pass, those first that kill for the least time."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.mutation.mutants import Mutant
from tests.mutation.recording import Test

BOUND_S = 120.0
"""What is run against one mutant at a time, as these tests last without it."""
QUICK_S = 1.0
BATCH_S = 30.0
"""Tests of one process: a mutant that the first ones kill does not wait for the files of the others to be imported."""


def reaching(root: Path, mutant: Mutant, tests: list[Test]) -> list[Test]:
    """The tests that execute the mutant's line, or whose file does for all its tests."""
    lines, path = statement(root, mutant.path, mutant.line), mutant.path
    return [
        test
        for test in tests
        if not lines.isdisjoint((*test.lines.get(path, ()), *test.shared.get(path, ())))
    ]


def batches(mutant: Mutant, tests: list[Test]) -> list[list[Test]]:
    """As many of these tests as the bound allows, in the order in which they are run, a process for each batch."""
    lasting: dict[str, float] = {}
    for test in tests:
        lasting[test.file] = lasting.get(test.file, 0) + test.seconds

    def rank(test: Test) -> tuple[int, float, str, float]:
        return _turn(test, mutant.path), lasting[test.file], test.file, test.seconds

    found: list[list[Test]] = []
    left, room, turn = BOUND_S, 0.0, -1
    for test in sorted(tests, key=rank):
        if test.seconds > left and found:
            continue
        if test.seconds > room or _turn(test, mutant.path) != turn:
            found.append([])
            room, turn = BATCH_S, _turn(test, mutant.path)
        found[-1].append(test)
        left, room = left - test.seconds, room - test.seconds
    return found


def _turn(test: Test, path: str) -> int:
    """First the quick ones of the module's own tests, then of others, then the slow, then what only imports it."""
    if path not in test.lines:
        return 3
    if test.seconds > QUICK_S:
        return 2
    room, name = Path(path).parts[:-1], Path(path).name
    return int(Path(test.file) != Path("tests", *room, f"test_{name}"))


@cache
def statement(root: Path, path: str, line: int) -> frozenset[int]:
    """The lines of the smallest statement around a line, of a compound one its head: Python reports some of them."""
    around = [
        node
        for node in ast.walk(ast.parse((root / path).read_text()))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    inner = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    body = getattr(inner, "body", None)
    end = max(body[0].lineno - 1, inner.lineno) if body else inner.end_lineno or line
    return frozenset({line, *range(inner.lineno, end + 1)})
