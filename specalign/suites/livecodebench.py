"""LiveCodeBench (arXiv 2403.07974), the problems added by release 6."""

from __future__ import annotations

import json

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_text


def read_livecodebench(row: Row, number: int) -> Prompt:
    """A problem with its starter code, if it has any. The public tests check an answer: programs
    that read standard input, or calls of a method."""
    problem = find_text(row, "question_content")
    starter = str(row.get("starter_code") or "").rstrip()
    ask = "Write a Python program that reads standard input and prints the answer."
    if starter:
        ask = f"Complete this Python code.\n\n```python\n{starter}\n```"
    cases = json.loads(row.get("public_test_cases") or "[]")
    runs = [(case["input"], case["output"]) for case in cases if case.get("testtype") == "stdin"]
    reference = {"runs": runs} if runs else None
    key = f"livecodebench-{row.get('question_id', number)}"
    return Prompt(key, f"{problem}\n\n{ask}", str(row.get("difficulty", "code")), reference)


SUITE = Suite(
    "livecodebench",
    "LiveCodeBench",
    "coding",
    read_livecodebench,
    Place(
        "livecodebench/code_generation_lite",
        files=("test6.jsonl",),
        revision="0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
    ),
    metric="pass@1",
    max_new_tokens=2048,
)
