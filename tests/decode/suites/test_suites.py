"""Suites: names, groups, every source of prompts in its order, and rows of every known layout."""

from __future__ import annotations

from decode.suites import builtin, gpqa, gsm8k, humaneval, math500, mtbench
from decode.suites.prompt import Prompt
from decode.suites.sources import load_suite


def test_builtin_has_forty_distinct_prompts_in_four_categories() -> None:
    loaded = load_suite(builtin.SUITE)
    assert (
        len(loaded.prompts)
        == 40
        == len({p.content for p in loaded.prompts})
        == len({p.id for p in loaded.prompts})
    )
    counts = {
        c: sum(p.category == c for p in loaded.prompts) for c in ("chat", "reasoning", "coding", "math")
    }
    assert set(counts.values()) == {10}


def test_rows_of_hub_and_package() -> None:
    assert mtbench.read({"prompt_id": 7, "category": "math", "prompt": ["one", "two"]}, 0) == Prompt(
        "mtbench-7", "one", "math"
    )
    assert mtbench.read({"question_id": "81", "turns": ["one", "two"]}, 0).content == "one"
    code = humaneval.read({"task_id": "HumanEval/3", "prompt": "def f(x):\n"}, 0)
    assert code.id == "humaneval-3" and "```python\ndef f(x):\n```" in code.content
    assert gsm8k.read({"question": "How many?"}, 4).id == "gsm8k-4"
    assert gsm8k.read({"prompt": "How many?", "id": "x"}, 4).content.startswith("How many?\n\nReason")
    assert math500.read({"problem": "1+1", "subject": "Algebra", "unique_id": "u"}, 0).category == "Algebra"


def test_gpqa_shuffles_the_answer_in_by_the_question() -> None:
    row = {
        "Question": "Which?", "Record ID": "r", "Correct Answer": "right",
        "Incorrect Answer 1": "w1", "Incorrect Answer 2": "w2", "Incorrect Answer 3": "w3",
    }  # fmt: skip
    prompt = gpqa.read(row, 0)
    assert prompt == gpqa.read(dict(row), 5)
    assert all(f"({letter}) " in prompt.content for letter in "ABCD")
    assert gpqa.read({"source": "SuperGPQA", "question": "?", "choices": ["a"]}, 0) is None
    assert (
        "(B) no"
        in gpqa.read({"source": "GPQA Diamond", "question": "?", "choices": ["yes", "no"]}, 0).content
    )
