"""HumanEval (arXiv 2107.03374): 164 Python functions to complete."""

from __future__ import annotations

from specalign.suites.places import PLACES
from specalign.suites.prompt import Prompt, Row, Suite, text


def read(row: Row, number: int) -> Prompt:
    """The function's head and docstring, in a request to a chat model."""
    head = row["prompt"]
    if not isinstance(head, str):
        raise KeyError("prompt")
    ask = "Complete the following Python function. Answer with the whole function."
    question = f"{ask}\n\n```python\n{head.rstrip()}\n```"
    return Prompt(text(row, "task_id").replace("/", "-").lower(), question, "code")


SUITE = Suite("humaneval", "HumanEval", "coding", read, PLACES["humaneval"])
