"""Scores answers against a suite's references: exact match, multiple choice, pass@1, ROUGE-L."""

import atexit
import json
import re
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from decode.evaluation.execution import run_program
from specalign.suites.livecodebench import list_cases, match_output

EXACT, CHOICE, LINE, CODE, ROUGE = (
    "exact match", "multiple choice", "last line", "pass@1", "ROUGE-L",
)  # fmt: skip
SECONDS = 5.0  # limit of a comparison by math-verify
_MARKUP = (
    r"(?:[\s*:($]|[`\"'“](?=\W?[A-J]\W?[`\"'”])|\\[(\[]|\\(?:boxed|text|textbf|mathbf|mathrm)\{"
    r"|(?i:the|option|choice)\b|I (?!because|since|do )(?:[a-z]+ ){1,3})*"
)
_STATED = re.compile(
    r"(?:(?i:(?:answer|(?:correct|right|best) (?:option|choice))[\s*]*(?:is|:))|\\boxed\{)"
    + _MARKUP
    + r"([A-HJ]|I(?!['’]|\s+(?!because|since)[a-z]))\b(?!\s*[=^+])"
)
_LETTER = re.compile(r"(?:^[^\w\n]*(?=.\).*\Z)|\b(?=.[\s.)*$}]*\Z))([A-J])", re.MULTILINE)
_LINE = re.compile(r"answer(?: is:?|[ *]*:(?=[ *]*[^\s*]))[\s*]*(.+)", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|mathbf|mathrm)\{(.*?)\}")
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_EDGES = " \t\n*`\"'$"
_OPTION = re.compile(r"(?:^|\()([a-z])(?:[).:]|$)")
_FENCE = re.compile(
    r"^([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)[^`\n]*?(```+)[ \t]*(\w*)[^`\n]*\n"
    r"(.*?)(?:^[ \t]*\2|\2[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("python", "python3", "py", "py3")
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)

_CALL = """
import json as _json
_call = getattr(Solution(), {method!r}) if "Solution" in globals() else globals()[{method!r}]
_found = _call(*map(_json.loads, {given!r}.split("\\n")))
assert _json.loads(_json.dumps(_found)) == _json.loads({wanted!r})
"""


def score(metric: str, reference: Any, text: str) -> float:
    """The score of an answer, 0 to 1, without the thoughts before it. Code is executed
    (`run_program`)."""
    return SCORERS[metric](reference, text.rpartition("</think>")[2])


def score_exact(reference: Any, text: str) -> float:
    """Whether the answer in \\boxed{}, or the last number, equals the reference as mathematics
    (math-verify, in a child process). An answer that takes over SECONDS or too much memory scores
    0, with a warning."""
    worker = _start_math_worker()
    if worker.poll() is not None:  # killed by others since the last answer
        _start_math_worker.cache_clear()
        worker = _start_math_worker()
    assert worker.stdin and worker.stdout
    reply = ""
    try:
        print(json.dumps([str(reference), text, SECONDS]), file=worker.stdin, flush=True)
        reply = worker.stdout.readline()
    finally:
        if not reply:
            _start_math_worker.cache_clear()
            worker.kill()
            worker.communicate()
    if not reply:
        why = f"math-verify stopped (exit code {worker.returncode}, limit {SECONDS:g} s)"
        warnings.warn(f"{why}; this answer scores 0: {text[-60:]!r}", stacklevel=2)
    return float(reply == "true\n")


@cache
def _start_math_worker() -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the parent
    )
    atexit.register(worker.communicate)  # it ends with its standard input
    if worker.stdout is None or worker.stdout.readline() != "ready\n":
        raise RuntimeError("math-verify can't be started")
    return worker


def score_choice(reference: Any, text: str) -> float:
    """Whether the answer's letter is the reference: that of the last `answer is (X)` or \\boxed{X},
    else the one that ends the text or begins its last line, as in `B) 3 kg`."""
    text = unicodedata.normalize("NFKC", text)  # full-width letters and parentheses
    stated = _STATED.findall(text) or _LETTER.findall(text.strip())
    return float(bool(stated) and stated[-1] == str(reference).strip().strip("()").upper())


def score_line(reference: Any, text: str) -> float:
    """Whether what follows the last `answer is` or `answer:`, the last \\boxed{}, or the last line,
    is the reference. BIG-Bench Hard's exact match, without Markdown, case and the final period; a
    letter may lack its parentheses."""
    text = _BOXED.sub(r"\nanswer is \1\n", _TEXT.sub(r"\1", text))
    stated = _LINE.findall(text) or text.strip().splitlines() or [""]
    wanted, found = _normalize(str(reference)), _normalize(stated[-1].rpartition("answer is ")[2])
    if option := _OPTION.fullmatch(wanted):
        chosen = _OPTION.search(found)
        return float(chosen is not None and chosen[1] == option[1])
    return float(found == wanted)


def _normalize(text: str) -> str:
    return " ".join(text.lstrip(_EDGES).rstrip(_EDGES + ".").split()).casefold()


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def score_rouge(reference: Any, text: str) -> float:
    """ROUGE-L's F measure (Lin, 2004)."""
    return float(_rouge().score(str(reference), text)["rougeL"].fmeasure)


def score_code(reference: Mapping[str, Any], text: str) -> float:
    """Whether the answer's code, after `head`, passes the tests. `tests` is a program that raises:
    for the first block, as in lm-evaluation-harness's humaneval (`head` is the prompt, which the
    answer repeats or continues) and mbpp. Else LiveCodeBench's cases: for the last block, as in
    its extract_code and testing_util.py."""
    blocks = find_blocks(text)
    if "tests" in reference:
        program = _join(reference.get("head", ""), blocks[0], reference["tests"])
        return float(run_program(program, name="solution").ended)
    code = _join(reference["head"], blocks[-1])
    return float(all(_passes(code, case, reference["method"]) for case in list_cases(reference)))


def _join(*parts: str) -> str:
    """One program; imports from __future__ have to come first."""
    code = "\n".join(parts)
    return "\n".join([*_FUTURE.findall(code), _FUTURE.sub("", code), ""])


def _passes(code: str, case: Mapping[str, str], method: str) -> bool:
    """A case calls a method with a line of JSON for each argument, or is standard input."""
    given, wanted = case["input"], case["output"]
    if method:
        call = _CALL.format(method=method, given=given, wanted=wanted)
        return run_program(code + call, name="solution").ended
    done = run_program(code, given)
    return done.passed and match_output(done.output, wanted)


def find_blocks(text: str) -> list[str]:
    """The blocks of Python, also one that was cut; without any, all blocks or the text. A block in
    a list loses the list's indentation."""
    found = _FENCE.findall(text)
    python = [block for block in found if block[2].lower() in _PYTHON]
    return [
        re.sub(rf"^[ \t]{{0,{len(indent)}}}", "", code, flags=re.MULTILINE)
        for indent, _, _, code in python or found
    ] or [text]


SCORERS: dict[str, Callable[[Any, str], float]] = {
    EXACT: score_exact,
    CHOICE: score_choice,
    LINE: score_line,
    CODE: score_code,
    ROUGE: score_rouge,
}
