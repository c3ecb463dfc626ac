"""MBPP (arXiv 2108.07732), the sanitized test split: 257 short Python programs, with tests."""

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_text

ASK = "Write a Python function that passes these tests. Answer with the whole function."


def read_mbpp(row: Row, number: int) -> Prompt:
    """`prompt` in the sanitized version, `text` in the full one. The tests are part of the prompt,
    as published: they show the function's name. Annotations of answers are not evaluated, as in
    lm-evaluation-harness."""
    tests = row.get("test_list")
    if not isinstance(tests, list) or not tests:
        raise KeyError("test_list")
    imports = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
    shown = "\n".join(map(str, tests))
    content = f"{find_text(row, 'prompt', 'text')}\n\n{ASK}\n\n```python\n{shown}\n```"
    head = "from __future__ import annotations"
    checks = {"head": head, "tests": "\n".join([*map(str, imports), shown])}
    return Prompt(f"mbpp-{row.get('task_id', number)}", content, "code", checks)


PLACE = Place(
    "google-research-datasets/mbpp",
    "sanitized",
    revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
)
SUITE = Suite("mbpp", "MBPP", "coding", read_mbpp, PLACE, metric="pass@1")
