"""Scores of answers, and programs in their sandbox."""

import base64
import json
import pickle
import zlib
from pathlib import Path

import pytest

from decode.evaluation import accuracy
from decode.evaluation.accuracy import CHOICE, CODE, EXACT, LINE, ROUGE, score
from decode.evaluation.execution import check_sandbox, run_program
from specalign.suites.humaneval import read_humaneval
from specalign.suites.livecodebench import HEAD, list_cases, match_output
from specalign.suites.mbpp import read_mbpp


def pack(cases: list[dict[str, str]]) -> str:
    """As LiveCodeBench packs private cases."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def reference(method: str, public: tuple[str, str], private: tuple[str, str]) -> dict[str, str]:
    first, second = ([{"input": given, "output": wanted}] for given, wanted in (public, private))
    return {"head": HEAD, "method": method, "public": json.dumps(first), "private": pack(second)}


SQUARES = reference("", ("3\n", "9\n"), ("4", "16"))
METHOD = reference("f", ('"a"\n2', '{"a": ["a", "a"]}'), ('"b"\n3', '{"b": ["b", "b", "b"]}'))
SOLUTION = "class Solution:\n  def f(self, x: str, n: int) -> Dict[str, List[str]]:\n    "
MBPP = read_mbpp({"text": "Double.", "test_list": ["assert f(2) == 4"]}, 0).reference
FUNCTION = {"head": 'import math\n\n\ndef f(x):\n    """Double."""\n', "tests": "assert f(2) == 4"}


@pytest.mark.parametrize(
    ("metric", "reference", "text", "wanted"),
    [
        (EXACT, "18", "so \\boxed{18}.", 1.0),
        (EXACT, "\\frac{1}{2}", "the answer is \\boxed{0.5}", 1.0),
        (EXACT, "18", "\\boxed{19}", 0.0),
        (CHOICE, "B", "A is wrong. The answer is (B).", 1.0),
        (CHOICE, "B", "**Answer: B**", 1.0),
        (CHOICE, "B", "\\boxed{C}", 0.0),
        (CHOICE, "B", "The answer is $B$.", 1.0),
        (CHOICE, "B", "\\boxed{\\textbf{(B)}}", 1.0),
        (CHOICE, "B", "So:\n\nB) 3 kg", 1.0),
        (CHOICE, "B", "\\boxed{C}? No. The answer is (B).", 1.0),
        (CHOICE, "B", "The answer is A? No: \\boxed{B}", 1.0),
        (CHOICE, "B", "Answer: I would go with (B). It is heavier.", 1.0),
        (CHOICE, "B", "Answer: I'd go with (B).", 1.0),
        (CHOICE, "B", "The answer is: I think B", 1.0),
        (CHOICE, "I", "The answer is: I think B", 0.0),
        (CHOICE, "I", "The answer is I because B is wrong.", 1.0),
        (CHOICE, "B", "The correct option is B, since A is wrong.", 1.0),
        (CHOICE, "B", "The answer is option B because A is wrong.", 1.0),
        (CHOICE, "B", "The answer is `B` and not A.", 1.0),
        (CHOICE, "B", 'The answer is "B" because A is wrong.', 1.0),
        (CHOICE, "B", 'The answer is "A Tale of Two Cities" (B)', 1.0),
        (CHOICE, "B", "The answer is \uff08B\uff09 because A is wrong.", 1.0),
        (CHOICE, "E", "\\boxed{E = mc^2}", 0.0),
        (CHOICE, "A", "A nice day", 0.0),
        (CHOICE, "A", "The answer is a matter of taste. I answer a question.", 0.0),
        (LINE, "(A)", "Hm.\nThe answer is (A).", 1.0),
        (LINE, "(A)", "The answer is $\\boxed{(A)}$.", 1.0),
        (LINE, "(A)", "**The answer is A.**", 1.0),
        (LINE, "(A)", "The answer is (B).", 0.0),
        (LINE, "(A)", "So \\boxed{\\text{A}}", 1.0),
        (LINE, "True", "So $\\boxed{True}$.", 1.0),
        (LINE, "True", "\\boxed{False}? No. The answer is True.", 1.0),
        (LINE, "No", "**Answer:** No", 1.0),
        (LINE, "No", "**Answer**: No\n\nIt turns left.", 1.0),
        (LINE, "No", "**Answer:**\n\nNo", 1.0),
        (LINE, "valid", "The answer is invalid", 0.0),
        (LINE, "] ) )", "The answer is `] ) )`.", 1.0),
        (LINE, "] ) )", "The answer is ] (.", 0.0),
        (LINE, "] ) )", "Answer: ] ) )", 1.0),
        (LINE, ")", "Therefore:\n...", 0.0),
        (LINE, ")", "", 0.0),
        (ROUGE, "the cat sat", "the cat sat", 1.0),
        (ROUGE, "the cat sat", "dogs", 0.0),
        (CODE, FUNCTION, "```python\ndef f(x):\n    return 2 * x\n```", 1.0),
        (CODE, FUNCTION, "    return 2 * x\n", 1.0),
        (CODE, FUNCTION, "```python\ndef f(x):\n    return x\n```", 0.0),
        (CODE, MBPP, "def f(x: List[int]):\n    return 2 * x", 1.0),
        (CODE, FUNCTION, "Answer:\n    return 2 * x\n", 0.0),
        (LINE, "8", "The answer is \\boxed{8}.", 1.0),
        (LINE, "True", "So the answer is: \\boxed{True}", 1.0),
        (LINE, "(B)", "The answer is \\boxed{B}.", 1.0),
        (LINE, "(A)", "The answer is A) foo", 1.0),
        (LINE, "(A)", "The answer is a: (B)", 1.0),
        (LINE, "(A)", "The answer is a foo", 0.0),
        (CODE, SQUARES, "```python\nprint(int(input()) ** 2)\n```", 1.0),
        (CODE, SQUARES, "```python\nimport sys\nprint(int(input()) ** 2)\nsys.exit(0)\n```", 1.0),
        (CODE, SQUARES, "```python\nx = int(input())\nprint(9 if x == 3 else 0)\n```", 0.0),
        (CODE, METHOD, f"```python\n{SOLUTION}return {{x: [x] * n}}\n```", 1.0),
        (CODE, METHOD, f"```python\n{SOLUTION}return {{x: (x,) * n}}\n```", 1.0),
        (CODE, METHOD, f"```python\n{SOLUTION}return {{x: [x, x]}}\n```", 0.0),
    ],
)
def test_scores(metric: str, reference: object, text: str, wanted: float) -> None:
    if metric == CODE:
        check_sandbox()
    assert score(metric, reference, text) == wanted


@pytest.mark.parametrize(
    ("metric", "reference", "answer"),
    [(EXACT, "18", "18"), (CHOICE, "B", "B)"), (LINE, "No", "No"), (ROUGE, "the cat", "the cat")],
)
def test_thoughts_are_not_scored(metric: str, reference: str, answer: str) -> None:
    thoughts = "<think>The answer is (A), \\boxed{19}.</think>"
    assert score(metric, reference, thoughts + answer) == 1.0
    assert score(metric, reference, f"<think>The answer is {answer}.</think>") == 0.0


def test_a_math_worker_that_was_killed_is_replaced() -> None:
    assert score(EXACT, "5", "5") == 1.0
    worker = accuracy._start_math_worker()
    worker.kill()
    worker.wait()
    assert score(EXACT, "5", "5") == 1.0


SUM = "\\sum_{n=1}^{10000000} \\frac1n"


@pytest.mark.parametrize(
    "answer", ["9^{9^{9}}", *(pytest.param(x, marks=pytest.mark.slow) for x in ("100000000!", SUM))]
)
def test_an_answer_that_math_verify_can_not_compare_scores_0(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "SECONDS", 0.5)
    with pytest.warns(UserWarning, match="scores 0"):
        assert score(EXACT, "5", f"\\boxed{{{answer}}}") == 0.0
    monkeypatch.undo()
    assert score(EXACT, "5", "\\boxed{5}") == 1.0


DOUBLE = "def f(x):\n    return 2 * x"
LISTED = "   def f(x):\n       return 2 * x"


@pytest.mark.parametrize(
    "text",
    [
        f"```python3\n{DOUBLE}\n```",
        f"``` py3\n{DOUBLE}\n```",
        f"```bash\npip install x\n```\n```python\n{DOUBLE}\n```",
        f"```python\n{DOUBLE}\n```\nOutput:\n```\n4\n```",
        f"```python\n{DOUBLE}\n```\nUsage:\n```python\nprint(f(input()))\n```",
        f"```\n{DOUBLE}\n```\nOutput:\n```text\n4\n```\nThis works.",
        f"1. ```python\n{LISTED}\n   ```",
        f"```python\n{DOUBLE}\n\nif __name__ == '__main__':\n    print(f(input()))\n```",
        f"```python\n{DOUBLE}\n\nimport unittest\nif __name__ == '__main__':\n    unittest.main()\n```",
        "```python\n    def g(y):\n        return 2 * y\n    return g(x)\n```",
        f"```python\nfrom __future__ import annotations\n{DOUBLE}\n```",
        f"<think>```python\ndef f(x): pass\n```</think>```python\n{DOUBLE}\n```",
        f"```python\n{DOUBLE}",
    ],
)
def test_code_is_found(text: str) -> None:
    check_sandbox()
    assert score(CODE, FUNCTION, text) == 1.0


def test_humaneval_calls_helpers_of_the_prompt() -> None:
    helper = "def twice(x):\n    return 2 * x\n\n\n"
    prompt = f'{helper}def f(x):\n    """Double."""\n'
    row = {"task_id": "x/1", "prompt": prompt, "entry_point": "f"}
    row["test"] = "def check(f):\n    assert f(2) == twice(2)"
    reference = read_humaneval(row, 0).reference
    assert score(CODE, reference, f"```python\n{DOUBLE}\n```") == 1.0


@pytest.mark.parametrize(
    ("output", "wanted", "equal"),
    [
        ("0.5", "0.50", True),
        ("1 2.0\n\n", "1 2", True),
        (" a b ", "a b", True),
        ("1 2", "1\n2", False),
        ("a 0.5", "a 0.50", False),
        ("nan", "1", False),
        ("snan", "1", False),
    ],
)
def test_outputs_are_compared_by_line_and_number(output: str, wanted: str, equal: bool) -> None:
    assert match_output(output, wanted) == equal


def test_livecodebench_programs() -> None:
    check_sandbox()
    depth = reference("", ("5000", "5000"), ("1", "1.0"))
    count = "def g(n): return n and 1 + g(n - 1)\nif __name__ == '__main__': print(g(int(input())))"
    assert score(CODE, depth, f"```\ndraft\n```\n```\n{count}\n```") == 1.0
    solution = f"{SOLUTION}return {{x: [x] * n}}\nif __name__ == '__main__':\n  input()\n  input()"
    text = f"```python3\nfrom __future__ import annotations\n{solution}\n```"
    assert score(CODE, METHOD, text) == 1.0


@pytest.mark.parametrize("leave", ["raise SystemExit", "import os; os._exit(0)"])
def test_a_program_that_leaves_before_its_tests_fails(leave: str) -> None:
    tests, at_once = {"tests": "assert f(2) == 4"}, f"```python\n{leave}\n```"
    for reference in (FUNCTION, tests, METHOD, SQUARES):
        assert score(CODE, reference, at_once) == 0.0
    assert score(CODE, FUNCTION, f"```python\ndef f(*args): {leave}\n```") == 0.0
    method = f"class Solution:\n  def f(self, *args): {leave}"
    assert score(CODE, METHOD, f"```python\n{method}\n```") == 0.0


def test_private_cases_are_not_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    trap = base64.b64encode(zlib.compress(pickle.dumps(Trap()))).decode()
    for private in (trap, "no base64", pack([])[:-8]):
        with pytest.raises(ValueError, match="broken private_test_cases"):
            list_cases({"public": "[]", "private": private})
    assert list(tmp_path.iterdir()) == []
    plain = {"input": "1", "output": "2"}
    assert list_cases({"public": "[]", "private": json.dumps([plain])}) == [plain]


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


@pytest.mark.parametrize("size", [2 << 20, 15 << 20])
def test_long_output_is_kept(size: int) -> None:
    assert run_program(f"print('x' * {size})").output == "x" * size + "\n"


def test_a_program_may_clear_its_folder() -> None:
    done = run_program("import os; [os.remove(name) for name in os.listdir()]; print(1)")
    assert done.ended and done.output == "1\n"


@pytest.mark.slow
def test_programs_end() -> None:
    assert run_program("import threading; print(input())", "text").output == "text\n"
    assert not run_program("while True: pass", seconds=1).passed
    assert not run_program("raise SystemExit(3)").passed
