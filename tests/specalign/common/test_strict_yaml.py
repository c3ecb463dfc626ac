"""YAML without its traps."""

import pytest

from specalign.common.errors import UserError
from specalign.common.strict_yaml import dump_yaml, parse_yaml


def test_yaml_without_its_traps() -> None:
    text = "a: yes\nb: 010\nc: 1:30\nd: 2024-01-01\ne: 1e-3\nf: [true, ~, -0]\ng: 1_000\n"
    texts = {"a": "yes", "b": "010", "c": "1:30", "d": "2024-01-01", "g": "1_000"}
    assert parse_yaml(text, "t") == {**texts, "e": 1e-3, "f": [True, None, 0]}
    values: list[object] = ["1e3", "null", "yes", "010", "", "~", " x", "a: b", "é"]
    values += [1e-9, 1e22, 10**18, True, None]
    assert parse_yaml(dump_yaml(values), "t") == values


@pytest.mark.parametrize("text", ["a: 1\na: 2", "1: a", "a: [", "a: !!python/name:os.system"])
def test_broken_yaml_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="^t: not valid YAML"):
        parse_yaml(text, "t")
