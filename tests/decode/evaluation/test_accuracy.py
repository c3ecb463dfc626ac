"""Scores of answers, and programs in their sandbox."""

from __future__ import annotations

import pytest

from decode.evaluation.accuracy import CHOICE, CODE, EXACT, LINE, ROUGE, score
from decode.evaluation.execution import check_sandbox, run_program

FUNCTION = {"head": 'def f(x):\n    """Double."""\n', "tests": "assert f(2) == 4"}


@pytest.mark.parametrize(
    ("metric", "reference", "text", "wanted"),
    [
        (EXACT, "18", "so \\boxed{18}.", 1.0),
        (EXACT, "\\frac{1}{2}", "the answer is \\boxed{0.5}", 1.0),
        (EXACT, "18", "\\boxed{19}", 0.0),
        (EXACT, "18", "no idea", 0.0),
        (CHOICE, "B", "A is wrong. The answer is (B).", 1.0),
        (CHOICE, "B", "**Answer: B**", 1.0),
        (CHOICE, "B", "\\boxed{C}", 0.0),
        (CHOICE, "B", "The answer is: **(B)**", 1.0),
        (CHOICE, "A", "A nice day", 0.0),
        (CHOICE, "A", "The answer is a matter of taste. I answer a question.", 0.0),
        (LINE, "(A)", "Hm.\nThe answer is (A).", 1.0),
        (LINE, "valid", "The answer is invalid", 0.0),
        (ROUGE, "the cat sat", "the cat sat", 1.0),
        (ROUGE, "the cat sat", "dogs", 0.0),
        (CODE, FUNCTION, "```python\ndef f(x):\n    return 2 * x\n```", 1.0),
        (CODE, FUNCTION, "    return 2 * x\n", 1.0),
        (CODE, FUNCTION, "```python\ndef f(x):\n    return x\n```", 0.0),
        (CODE, {"runs": [("3\n", "9\n")]}, "```python\nprint(int(input()) ** 2)\n```", 1.0),
        (CODE, {"runs": [("3\n", "8")]}, "```python\nprint(int(input()) ** 2)\n```", 0.0),
    ],
)
def test_scores(metric: str, reference: object, text: str, wanted: float) -> None:
    if metric == CODE:
        check_sandbox()
    assert score(metric, reference, text) == wanted


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import socket; socket.socket(socket.AF_INET6)",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "x = bytearray(3 << 30)",
        "open('x', 'wb').write(bytes(20 << 20))",
    ],
)
def test_what_programs_may_not(code: str) -> None:
    check_sandbox()
    assert not run_program(code).passed


@pytest.mark.slow
def test_programs_end() -> None:
    assert run_program("import threading; print(input())", "text").output == "text\n"
    assert not run_program("while True: pass", seconds=1).passed
    assert not run_program("raise SystemExit(3)").passed
