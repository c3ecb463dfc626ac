"""YAML without its traps."""

from __future__ import annotations

from specalign.common.strict_yaml import dump_yaml, parse_yaml


def test_yaml_without_its_traps() -> None:
    text = "a: yes\nb: 010\nc: 1:30\nd: 2024-01-01\ne: 1e-3\nf: [true, ~, -0]\ng: 1_000\n"
    assert parse_yaml(text, "t") == {
        "a": "yes",
        "b": "010",
        "c": "1:30",
        "d": "2024-01-01",
        "e": 1e-3,
        "f": [True, None, 0],
        "g": "1_000",
    }
    values = [
        "1e3",
        "null",
        "yes",
        "010",
        "",
        "~",
        " x",
        "a: b",
        "é",
        1e-9,
        1e22,
        10**18,
        True,
        None,
        {"a": []},
    ]
    assert parse_yaml(dump_yaml(values), "t") == values
