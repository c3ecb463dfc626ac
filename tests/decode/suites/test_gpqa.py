"""GPQA's rows, of the hub and of the package."""

from __future__ import annotations

from decode.suites import gpqa


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
