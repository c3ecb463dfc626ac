"""HumanEval's rows."""

from __future__ import annotations

import pytest

from decode.suites import humaneval


def test_rows() -> None:
    code = humaneval.read({"task_id": "HumanEval/3", "prompt": "def f(x):\n"}, 0)
    assert code.id == "humaneval-3" and "```python\ndef f(x):\n```" in code.content
    with pytest.raises(KeyError, match="prompt"):
        humaneval.read({"task_id": "HumanEval/3", "prompt": 3}, 0)
