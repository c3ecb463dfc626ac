"""The suites: their rows on the Hub and in packages, their names and groups."""

from __future__ import annotations

from collections import Counter

import pytest
from specalign.suites.benchmarks import SUITES

from specalign.suites import benchmarks
from specalign.suites.prompt import Prompt
from specalign.suites.registry import GROUPS, resolve
from specalign.suites.sources import load_suite


def test_names_groups_and_lists() -> None:
    assert [s.name for s, _ in resolve("mtbench, humaneval,mtbench")] == ["mtbench", "humaneval"]
    assert {s.name: own for s, own in resolve("math,gsm8k")} == {
        "gsm8k": True, "math500": False, "aime": False, "champ": False,
    }  # fmt: skip
    assert all(name in SUITES for members in GROUPS.values() for name in members)


def test_shipped_prompts_are_distinct() -> None:
    for name, number in (("builtin", 10), ("tasks", 5)):
        prompts = load_suite(SUITES[name]).prompts
        counts = Counter(p.category for p in prompts)
        assert len(counts) == 4 and {*counts.values()} == {number}
        assert len({p.content for p in prompts}) == len({p.id for p in prompts}) == len(prompts)


def test_maths() -> None:
    row = benchmarks.read_aime({"problem": "Find x.", "id": 3}, 0)
    assert row is not None and row.id == "aime-3" and row.content.startswith("Find x.\n\nReason")
    assert benchmarks.read_aime({"source": "AIME2025", "question": "Find y."}, 4) is not None
    assert benchmarks.read_aime({"source": "GPQA Diamond", "question": "Which?"}, 0) is None
    row = {"identifier": "P_1", "_text": " Prove it. ", "category": "Number theory"}
    proof = benchmarks.read_champ(row, 0)
    assert (proof.id, proof.category) == ("P_1", "Number theory")
    assert proof.content.startswith("Prove it.\n")
    assert benchmarks.read_gsm8k({"question": "How many?"}, 4).id == "gsm8k-4"
    named = benchmarks.read_gsm8k({"prompt": "How many?", "id": "x"}, 4)
    assert named.content.startswith("How many?\n\nReason")
    sum_ = {"problem": "1+1", "subject": "Algebra", "unique_id": "u"}
    assert benchmarks.read_math500(sum_, 0).category == "Algebra"
    assert benchmarks.read_math500({"problem": "1+1"}, 3).id == "math500-3"


def test_gpqa_shuffles_the_answer_in_by_the_question() -> None:
    row = {
        "Question": "Which?", "Record ID": "r", "Correct Answer": "right",
        "Incorrect Answer 1": "w1", "Incorrect Answer 2": "w2", "Incorrect Answer 3": "w3",
    }  # fmt: skip
    prompt = benchmarks.read_gpqa(row, 0)
    assert prompt == benchmarks.read_gpqa(dict(row), 5) and all(
        f"({letter}) " in prompt.content for letter in "ABCD"
    )
    assert (
        benchmarks.read_gpqa({"source": "SuperGPQA", "question": "?", "choices": ["a"]}, 0) is None
    )
    asked = benchmarks.read_gpqa(
        {"source": "GPQA Diamond", "question": "?", "choices": ["yes", "no"]}, 0
    )
    assert "(B) no" in asked.content


def test_code_and_chat() -> None:
    code = benchmarks.read_humaneval({"task_id": "HumanEval/3", "prompt": "def f(x):\n"}, 0)
    assert code.id == "humaneval-3" and "```python\ndef f(x):\n```" in code.content
    with pytest.raises(KeyError, match="prompt"):
        benchmarks.read_humaneval({"task_id": "HumanEval/3", "prompt": 3}, 0)
    talk = benchmarks.read_mtbench(
        {"prompt_id": 7, "category": "math", "prompt": ["one", "two"]}, 0
    )
    assert talk == Prompt("mtbench-7", "one", "math")
    assert (
        benchmarks.read_mtbench({"question_id": "81", "turns": ["one", "two"]}, 0).content == "one"
    )
    with pytest.raises(KeyError, match="prompt"):
        benchmarks.read_mtbench({"prompt": "not a list of turns"}, 0)
