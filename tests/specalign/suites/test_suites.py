"""The suites: their rows on the Hub and in packages, their names and groups."""

from __future__ import annotations

from collections import Counter

import pytest

from specalign.suites import aime, champ, gpqa, gsm8k, humaneval, math500, mtbench
from specalign.suites.places import PLACES
from specalign.suites.prompt import Prompt
from specalign.suites.registry import GROUPS, SUITES, resolve
from specalign.suites.sources import load_suite


def test_names_groups_and_lists() -> None:
    assert [s.name for s, _ in resolve("mtbench, humaneval,mtbench")] == ["mtbench", "humaneval"]
    assert {s.name: own for s, own in resolve("math,gsm8k")} == {
        "gsm8k": True, "math500": False, "aime": False, "champ": False,
    }  # fmt: skip
    assert all(name in SUITES for members in GROUPS.values() for name in members)
    assert {s.name: s.place for s in SUITES.values() if not s.rows} == PLACES


def test_shipped_prompts_are_distinct() -> None:
    for name, number in (("builtin", 10), ("tasks", 5)):
        prompts = load_suite(SUITES[name]).prompts
        counts = Counter(p.category for p in prompts)
        assert len(counts) == 4 and {*counts.values()} == {number}
        assert len({p.content for p in prompts}) == len({p.id for p in prompts}) == len(prompts)


def test_maths() -> None:
    row = aime.read({"problem": "Find x.", "id": 3}, 0)
    assert row is not None and row.id == "aime-3" and row.content.startswith("Find x.\n\nReason")
    assert aime.read({"source": "AIME2025", "question": "Find y."}, 4) is not None
    assert aime.read({"source": "GPQA Diamond", "question": "Which?"}, 0) is None
    row = {"identifier": "P_1", "_text": " Prove it. ", "category": "Number theory"}
    proof = champ.read(row, 0)
    assert (proof.id, proof.category) == ("P_1", "Number theory")
    assert proof.content.startswith("Prove it.\n")
    assert gsm8k.read({"question": "How many?"}, 4).id == "gsm8k-4"
    named = gsm8k.read({"prompt": "How many?", "id": "x"}, 4)
    assert named.content.startswith("How many?\n\nReason")
    sum_ = {"problem": "1+1", "subject": "Algebra", "unique_id": "u"}
    assert math500.read(sum_, 0).category == "Algebra"
    assert math500.read({"problem": "1+1"}, 3).id == "math500-3"


def test_gpqa_shuffles_the_answer_in_by_the_question() -> None:
    row = {
        "Question": "Which?", "Record ID": "r", "Correct Answer": "right",
        "Incorrect Answer 1": "w1", "Incorrect Answer 2": "w2", "Incorrect Answer 3": "w3",
    }  # fmt: skip
    prompt = gpqa.read(row, 0)
    assert prompt == gpqa.read(dict(row), 5) and all(
        f"({letter}) " in prompt.content for letter in "ABCD"
    )
    assert gpqa.read({"source": "SuperGPQA", "question": "?", "choices": ["a"]}, 0) is None
    asked = gpqa.read({"source": "GPQA Diamond", "question": "?", "choices": ["yes", "no"]}, 0)
    assert "(B) no" in asked.content


def test_code_and_chat() -> None:
    code = humaneval.read({"task_id": "HumanEval/3", "prompt": "def f(x):\n"}, 0)
    assert code.id == "humaneval-3" and "```python\ndef f(x):\n```" in code.content
    with pytest.raises(KeyError, match="prompt"):
        humaneval.read({"task_id": "HumanEval/3", "prompt": 3}, 0)
    talk = mtbench.read({"prompt_id": 7, "category": "math", "prompt": ["one", "two"]}, 0)
    assert talk == Prompt("mtbench-7", "one", "math")
    assert mtbench.read({"question_id": "81", "turns": ["one", "two"]}, 0).content == "one"
    with pytest.raises(KeyError, match="prompt"):
        mtbench.read({"prompt": "not a list of turns"}, 0)
