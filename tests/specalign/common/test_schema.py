"""Values as their types, or a line that says which value is wrong and where."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest

from specalign.common.errors import UserError
from specalign.common.schema import convert, parse_json, read_object


@dataclass
class Inner:
    at: int


@dataclass
class Outer:
    name: str
    inner: Inner | None = None
    rates: dict[str, float] = field(default_factory=dict)


class Loose(TypedDict):
    needed: int


def test_values_become_their_types() -> None:
    given = {"name": "a", "inner": {"at": 1}, "rates": {"x": 1}, "unknown": 0}
    made = convert(given, Outer, "", "f")
    assert made == Outer("a", Inner(1), {"x": 1.0}) and isinstance(made.rates["x"], float)
    assert convert({"needed": 1, "other": "kept"}, Loose, "", "f") == {"needed": 1, "other": "kept"}


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ({"inner": None}, Outer, "f: name is missing"),
        ({"name": 1}, Outer, "f: name=1 must be text"),
        ({"name": "a", "inner": {"at": "x"}}, Outer, "f: inner.at='x' must be an integer"),
        ({"name": "a", "inner": {"at": True}}, Outer, "f: inner.at=True must be an integer"),
        ({"name": "a", "rates": {"x": []}}, Outer, "f: rates.x=[] must be a number"),
        ({"name": "a", "rates": {"x": 10**400}}, Outer, "must be a number"),
        ({}, Loose, "f: needed is missing"),
        ([], Loose, "must be a mapping"),
        ([1], list[list[Any]], "=1 must be a list"),
        ("c", Literal["ab", "b"], "is unknown (one of: ab, b)"),
    ],
)
def test_what_does_not_fit_is_named(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        convert(value, kind, "", "f")


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", "[" * 100_000, "9" * 5000, '{"a": Infinity}', '"\\ud800"']
)
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(UserError, match="f: not readable JSON"):
        parse_json(text, "f")


def test_files_that_hold_no_object(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff")
    (tmp_path / "b").write_text("[]")
    says = {"a": "not readable", "b": "must contain an object, not list", "c": "not readable"}
    for name, message in says.items():
        with pytest.raises(UserError, match=message):
            read_object(tmp_path / name)
