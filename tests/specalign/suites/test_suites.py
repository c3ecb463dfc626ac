"""The suites: their rows on the Hub and in packages, their names and groups."""

from collections import Counter

import pytest

from specalign.suites.livecodebench import HEAD
from specalign.suites.prompt import Prompt
from specalign.suites.registry import GROUPS, SUITES, resolve
from specalign.suites.sources import load_suite


def test_names_groups_and_lists() -> None:
    assert [s.name for s in resolve("mtbench, humaneval,mtbench")] == ["mtbench", "humaneval"]
    assert [s.name for s in resolve("math,gsm8k")] == ["gsm8k", "math500", "aime", "champ"]
    assert all(name in SUITES for members in GROUPS.values() for name in members)


def test_shipped_prompts_are_distinct() -> None:
    for name, number in (("builtin", 10), ("tasks", 5)):
        prompts = load_suite(SUITES[name]).prompts
        counts = Counter(p.category for p in prompts)
        assert len(counts) == 4 and {*counts.values()} == {number}
        assert len({p.content for p in prompts}) == len({p.id for p in prompts}) == len(prompts)


def test_maths() -> None:
    row = SUITES["aime"].read({"problem": "Find x.", "id": 3}, 0)
    assert row is not None and row.id == "aime-3" and row.content.startswith("Find x.\n\nReason")
    assert SUITES["aime"].read({"source": "AIME2025", "question": "Find y."}, 4) is not None
    assert SUITES["aime"].read({"source": "GPQA Diamond", "question": "Which?"}, 0) is None
    row = {"identifier": "P_1", "_text": " Prove it. ", "category": "Number theory"}
    proof = SUITES["champ"].read(row, 0)
    assert (proof.id, proof.category) == ("P_1", "Number theory")
    assert proof.content.startswith("Prove it.\n")
    assert SUITES["gsm8k"].read({"question": "How many?"}, 4).id == "gsm8k-4"
    named = SUITES["gsm8k"].read({"prompt": "How many?", "id": "x"}, 4)
    assert named.content.startswith("How many?\n\nReason")
    sum_ = {"problem": "1+1", "subject": "Algebra", "unique_id": "u"}
    assert SUITES["math500"].read(sum_, 0).category == "Algebra"
    assert SUITES["math500"].read({"problem": "1+1"}, 3).id == "math500-3"


def test_gpqa_shuffles_the_answer_in_by_the_question() -> None:
    row = {
        "Question": "Which?", "Record ID": "r", "Correct Answer": "right",
        "Incorrect Answer 1": "w1", "Incorrect Answer 2": "w2", "Incorrect Answer 3": "w3",
    }  # fmt: skip
    prompt = SUITES["gpqa"].read(row, 0)
    assert prompt == SUITES["gpqa"].read(dict(row), 5)
    assert all(f"({letter}) " in prompt.content for letter in "ABCD")
    row = {"source": "GPQA Diamond", "question": "?", "choices": ["yes", "no"]}
    assert "(B) no" in SUITES["gpqa"].read(row, 0).content
    assert SUITES["gpqa"].read({**row, "source": "SuperGPQA"}, 0) is None


def test_code_and_chat() -> None:
    code = SUITES["humaneval"].read({"task_id": "HumanEval/3", "prompt": "def f(x):\n"}, 0)
    assert code.id == "humaneval-3" and "```python\ndef f(x):\n```" in code.content
    with pytest.raises(KeyError, match="prompt"):
        SUITES["humaneval"].read({"task_id": "HumanEval/3", "prompt": 3}, 0)
    talk = SUITES["mtbench"].read({"prompt_id": 7, "category": "math", "prompt": ["one", "two"]}, 0)
    assert talk == Prompt("mtbench-7", "one", "math", later=("two",))
    turns = {"question_id": "81", "turns": ["one", "two"]}
    assert SUITES["mtbench"].read(turns, 0).content == "one"
    with pytest.raises(KeyError, match="prompt"):
        SUITES["mtbench"].read({"prompt": "not a list of turns"}, 0)


ROWS = {
    "cnn_dm": {"article": "It rained.", "highlights": "Rain.", "id": "x"},
    "openwebtext": {"text": "word " * 100},
    "lm1b": {"text": "one two three four five six seven eight nine ten"},
    "specbench": {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
    "redhat": {"prompt": "Translate.", "part": "translation.jsonl"},
    "speedbench": {"question_id": "q", "category": "rag", "turns": ["one"], "multiturn": False},
    "speedbench_8k": {"question_id": "q", "category": "low_entropy", "turns": ["one"]},
    "mbpp": {"task_id": 3, "prompt": "Add.", "test_list": ["assert f(1, 2) == 3"], "test_imports": []},
    "livecodebench": {
        "question_content": "Square it.", "question_id": "1", "difficulty": "easy", "starter_code": "",
        "public_test_cases": '[{"input": "3", "output": "9", "testtype": "stdin"}]',
        "private_test_cases": "[]", "metadata": '{"func_name": "square"}',
    },
    "alpaca": {"instruction": "Name it.", "input": "a red fruit", "output": "apple"},
    "arena_hard": {"question_id": "u", "cluster": "SQL", "turns": [{"content": "Explain joins."}]},
    "ifbench": {"key": "0", "prompt": "Say x twice.", "instruction_id_list": ["count:keywords"]},
    "bbh": {"input": "not ( True ) is", "target": "False", "part": "boolean_expressions"},
    "arc": {
        "id": "a", "question": "Which?", "choices": {"text": ["x", "y"], "label": ["1", "2"]},
        "answerKey": "2",
    },
    "mmlu_pro": {"question_id": 7, "question": "Which?", "options": ["x", "y"], "answer": "B", "category": "law"},
    "tools": {
        "id": "simple_0", "question": [[{"role": "user", "content": "Area?"}]],
        "function": [{"name": "area", "parameters": {"type": "dict", "properties": {"b": {"type": "float"}}}}],
    },
}  # fmt: skip
REFERENCES = {
    "cnn_dm": "Rain.", "mbpp": {
        "head": "from __future__ import annotations", "tests": "\nassert f(1, 2) == 3",
    }, "livecodebench": {
        "head": HEAD, "method": "square", "private": "[]",
        "public": '[{"input": "3", "output": "9", "testtype": "stdin"}]',
    },
    "bbh": "False", "arc": "B", "mmlu_pro": "B",
}  # fmt: skip
CATEGORIES = {
    "specbench": "mt_bench", "redhat": "translation", "arena_hard": "SQL", "ifbench": "count",
    "bbh": "boolean_expressions", "mmlu_pro": "law", "speedbench": "rag",
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_the_layout_of_their_source(name: str) -> None:
    prompt = SUITES[name].read(ROWS[name], 0)
    assert prompt is not None and prompt.id and prompt.content
    assert prompt.reference == REFERENCES.get(name)
    assert prompt.category == CATEGORIES.get(name, prompt.category)
    needed = {"article", "text", "turns", "question", "instruction", "private_test_cases"}
    needed |= set() if name == "alpaca" else {"input"}
    for column in needed & set(ROWS[name]):
        with pytest.raises(KeyError):
            SUITES[name].read({k: v for k, v in ROWS[name].items() if k != column}, 0)


def test_redhats_turns() -> None:
    for turn in ("one", {"role": "user", "content": "one"}):
        assert SUITES["redhat"].read({"turns": [turn, "two"]}, 0).content == "one"
    with pytest.raises(KeyError, match="turns"):
        SUITES["redhat"].read({"turns": []}, 0)


def test_texts_to_continue_and_tools() -> None:
    page = SUITES["openwebtext"].read(ROWS["openwebtext"], 0)
    assert page is not None and page.raw and len(str(page.content).split()) == 64
    assert SUITES["openwebtext"].read({"text": "too short"}, 0) is None
    assert str(SUITES["cnn_dm"].read(ROWS["cnn_dm"], 0).content).endswith("TL;DR:")
    call = SUITES["tools"].read(ROWS["tools"], 0).content
    assert call.tools[0]["function"]["parameters"]["type"] == "object"
    assert call.tools[0]["function"]["parameters"]["properties"]["b"]["type"] == "number"
