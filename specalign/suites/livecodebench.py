"""LiveCodeBench (arXiv 2403.07974), the problems added by release 6."""

import base64
import json
import pickletools
import zlib
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_text

ASK = "Write a Python program that reads standard input and prints the answer."
_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
HEAD = "".join(f"from {name} import *\n" for name in (*_MODULES, "builtins"))
HEAD += "".join(f"import {name}\n" for name in _MODULES) + "sys.setrecursionlimit(50000)\n"
"""What the benchmark's own harness imports before an answer."""


def read_livecodebench(row: Row, number: int) -> Prompt:
    """A problem with its starter code, if it has any. The public and private tests check an answer:
    programs that read standard input, or calls of a method; without any it is not scored."""
    problem = find_text(row, "question_content")
    starter = str(row.get("starter_code") or "").rstrip()
    ask = ASK
    if starter:
        ask = f"Complete this Python code.\n\n```python\n{starter}\n```"
    reference = {
        "head": HEAD,
        "method": json.loads(row.get("metadata") or "{}").get("func_name") or "",
        "public": find_text(row, "public_test_cases"),
        "private": find_text(row, "private_test_cases"),
    }
    key = f"livecodebench-{row.get('question_id', number)}"
    scored = reference if list_cases(reference) else None
    return Prompt(key, f"{problem}\n\n{ask}", str(row.get("difficulty", "code")), scored)


def list_cases(reference: Mapping[str, Any]) -> list[dict[str, str]]:
    """The public and private cases of a problem, each with `input` and `output`. Raises ValueError
    if they are broken."""
    return [case for kind in ("public", "private") for case in _read_cases(reference[kind], kind)]


def _read_cases(text: str, kind: str) -> list[dict[str, str]]:
    """Private cases are JSON, or a pickle of JSON text, packed by zlib and base64, of which only the
    text is read: nothing is unpickled."""
    try:
        if not text.startswith("["):
            pickled = zlib.decompress(base64.b64decode(text))
            text = next(arg for _, arg, _ in pickletools.genops(pickled) if type(arg) is str)
        cases = json.loads(text)
        if not isinstance(cases, list) or not all(map(_is_case, cases)):
            raise ValueError("not a list of objects with the texts 'input' and 'output'")
    except (ValueError, zlib.error, StopIteration) as error:
        raise ValueError(f"broken {kind}_test_cases: {error}") from None
    return cases


def _is_case(case: object) -> bool:
    return isinstance(case, dict) and all(
        isinstance(case.get(key), str) for key in ("input", "output")
    )


def match_output(output: str, wanted: str) -> bool:
    """Whether an output has as many lines as wanted, each with the same text or the same numbers:
    the comparison of the benchmark's own testing_util.py."""
    lines = output.strip().split("\n")
    wanted_lines = wanted.strip().split("\n")
    if len(lines) != len(wanted_lines):
        return False
    return all(map(_match_line, lines, wanted_lines))


def _match_line(line: str, wanted: str) -> bool:
    if line.strip() == wanted.strip():
        return True
    try:
        return [*map(Decimal, line.split())] == [*map(Decimal, wanted.split())]
    except InvalidOperation:
        return False


PLACE = Place(
    "livecodebench/code_generation_lite",
    files=("test6.jsonl",),
    revision="0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
)
SUITE = Suite(
    "livecodebench",
    "LiveCodeBench",
    "coding",
    read_livecodebench,
    PLACE,
    metric="pass@1",
    max_new_tokens=2048,
)
